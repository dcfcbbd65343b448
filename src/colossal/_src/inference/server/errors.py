"""Errors in the form of the API of OpenAI, whose clients read the field `error`."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from colossal._src.inference.online.refusals import DeadlineError, QueueFullError, UnavailableError
from colossal.errors import ConfigError, UnsupportedError

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_SERVER_ERROR = 500
_NO_OBJECT = "The body is a JSON object."
_ALTERNATIVES = {"str", "int", "float", "bool"}  # what pydantic adds to the path of a field with several types
_STATUS: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((QueueFullError,), 429),
    ((UnavailableError,), 503),
    ((DeadlineError,), 504),
    ((ConfigError, UnsupportedError), 400),
)


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The object that clients read."""
        other = "server_error" if self.status >= _SERVER_ERROR else "invalid_request_error"
        kind = _TYPES.get(self.status, other)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Make the answer; one that asks to come again says when."""
        headers = {"Retry-After": "1"} if self.status in {429, 503} else None
        return JSONResponse(self.body, self.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """Find the status of an exception; of an unexpected one no details are told."""
    if isinstance(error, ApiError):
        return error
    for classes, status in _STATUS:
        if isinstance(error, classes):
            return ApiError(status, str(error))
    return ApiError(_SERVER_ERROR, f"The request has failed in the server: {type(error).__name__}.")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception in one form."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).response()

    async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return describe_invalid(error).response()

    async def answer_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # while the body was read
            return error.__cause__.response()
        if isinstance(error.__cause__, UnicodeDecodeError):
            return ApiError(400, f"{_NO_OBJECT} Found bytes that are no UTF-8. Send application/json.").response()
        return ApiError(error.status_code, str(error.detail)).response()

    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    for known in (ApiError, *(each for classes, _ in _STATUS for each in classes), Exception):
        app.add_exception_handler(known, answer)


def describe_invalid(error: RequestValidationError) -> ApiError:
    """Name the field that is wrong, and say what it has to be."""
    # Of a field that may be one of several things, the error that comes deepest says most.
    first = max(error.errors(), key=lambda each: (len(_path(each)), not each["type"].endswith("_type")))
    path = _path(first)
    if first["type"] == "json_invalid" or not path:
        return ApiError(400, f"{_NO_OBJECT} Found none: {first['msg']}. Send application/json.")
    field = str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field: {field}. Leave it out.", param=field)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message}. Found {_shorten(first.get('input'))}.", param=field)


def _path(error: dict[str, Any]) -> list[str | int]:
    """The keys from the body to what is wrong."""
    keys = error["loc"][1:]
    return [key for key in keys if isinstance(key, int) or (key.isidentifier() and key not in _ALTERNATIVES)]


def _shorten(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
