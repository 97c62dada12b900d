"""`json_schema`: the completion must be JSON that fits a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn, Self

from pydantic import model_validator

from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import TextConfig, column_of, fenced_blocks, shortened, text_of


class JsonSchemaConfig(TextConfig):
    """The schema, and where the JSON is in the completion."""

    json_schema: dict[str, Any] | bool | None = None
    """JSON schema of all completions; give either this or `schema_column`."""
    schema_column: str | None = None
    """Column with the JSON schema of each row, as a mapping or as JSON text."""
    read: Literal["block_or_whole", "block", "whole"] = "block_or_whole"
    """`block`: the first fenced block; `whole`: the whole completion; `block_or_whole`: the whole completion if it has
    no block."""

    @model_validator(mode="after")
    def _has_one_schema(self) -> Self:
        if (self.json_schema is None) == (self.schema_column is None):
            raise ValueError("set either json_schema or schema_column, and not both")
        return self


class JsonSchemaVerifier:
    """Reward 1 for JSON that fits the schema, 0 for JSON that does not."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        self._config = config
        if config.json_schema is not None:
            _validator(json.dumps(config.json_schema))

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        validator = _validator(self._schema(row))
        from referencing.exceptions import Unresolvable

        content = _parsed(self._json_text(text_of(completion, self._config)))
        try:
            return float(validator.is_valid(content))
        except RecursionError:
            raise ParseFailure("the JSON is nested too deeply") from None
        except Unresolvable as error:
            raise DataError(
                f"the JSON schema has a reference that it does not define: {error}; add the definition to the schema"
            ) from error

    def _schema(self, row: Mapping[str, Any]) -> str:
        if self._config.schema_column is None:
            return json.dumps(self._config.json_schema)
        schema = column_of(row, self._config.schema_column, "schema_column")
        return schema if isinstance(schema, str) else json.dumps(schema)

    def _json_text(self, text: str) -> str:
        if self._config.read == "whole":
            return text
        if blocks := fenced_blocks(text):
            return blocks[0][1]
        if self._config.read == "block":
            raise ParseFailure("the completion has no fenced block")
        return text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ParseFailure("the JSON is nested too deeply") from None
    except ValueError as error:
        raise ParseFailure(f"the completion is not JSON: {error}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> Any:
    """Make the validator of a schema; it never fetches other schemas from the network or a file."""
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise ConfigError(
            'the verifier json_schema needs jsonschema; install it with pip install "lucidrl[data]"'
        ) from error
    from jsonschema import Draft202012Validator

    try:
        schema = json.loads(schema_text)
        validator_class = validator_for(schema, default=Draft202012Validator)
        validator_class.check_schema(schema)
    except (ValueError, SchemaError, RecursionError, AttributeError, TypeError) as error:
        reason = getattr(error, "message", str(error))
        raise DataError(f"{shortened(schema_text)} is not a JSON schema: {reason}") from error
    return validator_class(schema, registry=Registry())
