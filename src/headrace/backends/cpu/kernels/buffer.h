// Zeroed memory aligned for vectors, straight from the kernel: pages become resident when touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace headrace {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, [[maybe_unused]] bool huge_pages = false) : bytes_(bytes) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
    if (huge_pages) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Buffer() {
    if (data_) munmap(data_, bytes_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }

  uint8_t* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace headrace
