from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_CORRECT: _ClassVar[Outcome]
    OUTCOME_WRONG: _ClassVar[Outcome]
    OUTCOME_NO_ANSWER: _ClassVar[Outcome]
    OUTCOME_UNPARSABLE: _ClassVar[Outcome]
    OUTCOME_TIMED_OUT: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_CORRECT: Outcome
OUTCOME_WRONG: Outcome
OUTCOME_NO_ANSWER: Outcome
OUTCOME_UNPARSABLE: Outcome
OUTCOME_TIMED_OUT: Outcome
OUTCOME_ERROR: Outcome

class ScoreRequest(_message.Message):
    __slots__ = ("items", "group_id")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    group_id: str
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ..., group_id: _Optional[str] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("item_id", "reward_function", "completion", "reference_answer")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    reward_function: str
    completion: str
    reference_answer: str
    def __init__(self, item_id: _Optional[str] = ..., reward_function: _Optional[str] = ..., completion: _Optional[str] = ..., reference_answer: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("item_id", "outcome", "reward", "extracted_answer", "reason", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    EXTRACTED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    outcome: Outcome
    reward: float
    extracted_answer: str
    reason: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, item_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reward: _Optional[float] = ..., extracted_answer: _Optional[str] = ..., reason: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...
