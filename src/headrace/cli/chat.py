"""A conversation at a terminal or through a pipe: turns, slash commands, and the room left in the
context.

Answers go to `out`, everything else to `notes`. Nothing is ever cut from the history: when it no
longer fits the context, the session says so with both numbers and leaves the choice to the user.
"""

from __future__ import annotations

import sys
from typing import TextIO

from headrace.cli.answer import (
    Answer,
    Answers,
    Message,
    catching_interrupts,
    encode_messages,
    fit_params,
    printable,
    stream_answer,
)
from headrace.cli.history import History
from headrace.cli.lines import Lines, StreamLines, TerminalLines, read_message
from headrace.core.errors import ContextLengthError, HeadraceError
from headrace.core.request import FinishReason, SamplingParams

DEFAULT_MAX_TOKENS = 1024
_HELP = '''\
/reset        forget the conversation
/system TEXT  set the system prompt (alone: show it)
/stats        tokens in the conversation and the last answer's timings
/help         this list
/exit         leave (also Ctrl-D)
Ctrl-C stops an answer; twice at the prompt, it leaves.
"""           begins a message of several lines, which """ ends; a paste is one message
A line that begins with // is sent with one slash.'''


class ChatSession:
    def __init__(
        self,
        llm: Answers,
        params: SamplingParams,
        *,
        system: str | None = None,
        source: TextIO | None = None,
        out: TextIO | None = None,
        notes: TextIO | None = None,
        history: History | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[Message] = []
        self._last: Answer | None = None
        self._source = source or sys.stdin
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._interactive = self._source.isatty()
        self._escape = self._out.isatty()
        at_terminal = self._interactive and self._source is sys.stdin and self._escape
        self._lines: Lines = (
            TerminalLines(history, self._notes)
            if at_terminal
            else StreamLines(self._source, self._notes, prompts=self._interactive)
        )

    def run(self) -> None:
        """Reads and answers until the input ends or the user leaves."""
        if self._interactive:
            self._note("Type a message; /help lists commands, Ctrl-D leaves.")
        try:
            self._converse()
        except KeyboardInterrupt:
            self._note("\nBye.")

    def _converse(self) -> None:
        interrupted = False
        while True:
            try:
                typed = read_message(self._lines)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._note("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
                continue
            interrupted = False
            if typed is None:
                return
            if typed.is_command_free:
                if typed.text.strip():
                    self._answer(typed.text)
            elif not self._take(typed.text):
                return

    def _take(self, line: str) -> bool:
        """Runs one line of input; returns False when the user asked to leave."""
        command, _, rest = line.partition(" ")
        if not line:
            return True
        if line.startswith("//"):
            self._answer(line[1:])
        elif command in ("/exit", "/quit", "/bye"):
            return False
        elif command == "/reset":
            self._turns.clear()
            self._note("The conversation is forgotten.")
        elif command == "/system":
            self._set_system(rest.strip())
        elif command == "/stats":
            self._show_stats()
        elif command == "/help":
            self._note(_HELP)
        elif command.startswith("/"):
            self._note(f"Unknown command {command}; /help lists the commands.")
        else:
            self._answer(line)
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._note("The system prompt is set; the conversation is kept (/reset forgets it).")
        else:
            shown = self._system or "(none set; the model's template may have its own)"
            self._note(f"System prompt: {shown}")

    def _show_stats(self) -> None:
        held = len(self._encode()) if self._turns else 0
        self._note(
            f"conversation: {held} of {self._llm.context_tokens} tokens, "
            f"{len(self._turns)} messages"
        )
        if self._last is not None:
            self._note(f"last answer: {self._last.summary()}")

    def _encode(self) -> list[int]:
        opening = [] if self._system is None else [{"role": "system", "content": self._system}]
        return encode_messages(self._llm, opening + self._turns)

    def _answer(self, text: str) -> None:
        """One turn. It is added to the history only with its answer: a failed one can be sent
        again."""
        self._turns.append({"role": "user", "content": text})
        answer = None
        try:
            answer = self._stream()
        except ContextLengthError as error:
            if not self._interactive:
                raise
            self._note(
                f"error: {error.cause}\n  try: /reset to forget the conversation, or a shorter "
                "message; this one was not sent."
            )
        except HeadraceError as error:
            if not self._interactive:
                raise
            self._note(f"error: {error.cause}\n  try: {error.remedy}")
        except KeyboardInterrupt:  # a second Ctrl-C, while the first was waiting for a token
            self._note("\n(stopped)")
        finally:
            if answer is None or not answer.text:
                self._turns.pop()
            else:
                self._turns.append({"role": "assistant", "content": answer.text})

    def _stream(self) -> Answer:
        ids = self._encode()
        context_tokens = self._llm.context_tokens
        if len(ids) >= context_tokens:
            raise ContextLengthError(
                f"With this message the conversation is {len(ids)} tokens, and the context holds "
                f"{context_tokens}.",
                "Start a new conversation with /reset, or send a shorter message.",
                param="messages",
            )
        params = fit_params(
            self._params,
            prompt_tokens=len(ids),
            context_tokens=context_tokens,
            default_tokens=DEFAULT_MAX_TOKENS,
            is_session=True,
        )
        with catching_interrupts() as stopped:
            answer = stream_answer(self._llm, ids, params, self._show, stopped)
        self._show("\n")
        self._last = answer
        self._explain_end(answer, params)
        return answer

    def _explain_end(self, answer: Answer, params: SamplingParams) -> None:
        held = answer.prompt_tokens + answer.answer_tokens
        if answer.finish_reason is None:
            self._note("(stopped)")
        elif answer.finish_reason is FinishReason.LENGTH:
            if held >= self._llm.context_tokens:
                self._note(
                    f"(the answer is cut: the conversation is {held} tokens and the context holds "
                    f"{self._llm.context_tokens}; /reset starts a new one)"
                )
            else:
                self._note(f"(the answer is cut at --max-tokens {params.max_tokens})")

    def _show(self, text: str) -> None:
        self._out.write(printable(text) if self._escape else text)
        self._out.flush()

    def _note(self, text: str) -> None:
        self._notes.write(f"{text}\n")
        self._notes.flush()
