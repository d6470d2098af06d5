"""What backends share (plans in flight, answers, the recorder). Knows no particular backend."""
