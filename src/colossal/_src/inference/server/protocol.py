"""The bodies of requests: those of the API of OpenAI, with further fields of our sampling."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from colossal._src.inference.sampling_params import SamplingParams

_NEUTRAL: tuple[Any, ...] = (None, [], {}, "none", {"type": "text"})
_REASONS = {
    "best_of": "is not supported, since outputs are not ranked; use n",
    "suffix": "is not supported, since models here continue a text",
    "logit_bias": "is not supported",
    "response_format": "is not supported, since no grammar restricts the tokens",
}


def _whole_characters(text: str) -> str:
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise ValueError("is Unicode; send whole characters, not one of two surrogates")
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """An object whose fields are known, and have the type that they should have."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """What a stream has besides the outputs."""

    include_usage: bool = False


class GenerationBody(Body):
    """Fields of completions and of chats alike; what is null has its default."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=16)] | None = None
    # Of no effect on an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Not of OpenAI.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    timeout_seconds: Annotated[Number, Field(gt=0)] | None = None
    # Refused by name.
    logit_bias: Any = None
    response_format: Any = None

    @field_validator("logit_bias", "response_format", "best_of", "suffix", check_fields=False)
    @classmethod
    def _refuse(cls, value: Any, info: Any) -> Any:
        # as many outputs as are returned are not ranked
        if value not in _NEUTRAL and not (info.field_name == "best_of" and value == (info.data.get("n") or 1)):
            raise ValueError(_REASONS[info.field_name])
        return value

    @field_validator("stream_options", "top_logprobs", check_fields=False)
    @classmethod
    def _need_another(cls, value: Any, info: ValidationInfo) -> Any:
        needed = {"stream_options": "stream", "top_logprobs": "logprobs"}[str(info.field_name)]
        # one that is wrong itself is not there, and its own error says so
        if value is not None and info.data.get(needed, True) in (None, False):
            raise ValueError(f"is for requests with {needed}; set {needed} to true")
        return value

    def params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Read the sampling parameters; what is not said has the default of OpenAI."""
        names = ("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p")
        names += ("repetition_penalty", "stop_token_ids", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) not in (None, "")}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


class CompletionBody(GenerationBody):
    """Of ``/v1/completions``."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Any = None
    suffix: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt or many, as a list."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)


class TextPart(Body):
    """A text in a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """What somebody says in a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart]
    name: Text | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None

    @field_validator("tools", "tool_choice", "functions", "function_call")
    @classmethod
    def _refuse_tools(cls, value: Any) -> Any:
        if value not in _NEUTRAL:
            raise ValueError("is not supported, since models here call no tools")
        return value
