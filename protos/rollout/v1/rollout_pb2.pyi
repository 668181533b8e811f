from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobSemantics(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROB_SEMANTICS_UNSPECIFIED: _ClassVar[LogprobSemantics]
    LOGPROB_SEMANTICS_RAW: _ClassVar[LogprobSemantics]
    LOGPROB_SEMANTICS_PROCESSED: _ClassVar[LogprobSemantics]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
LOGPROB_SEMANTICS_UNSPECIFIED: LogprobSemantics
LOGPROB_SEMANTICS_RAW: LogprobSemantics
LOGPROB_SEMANTICS_PROCESSED: LogprobSemantics
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("model", "tokenizer_fingerprint", "vocabulary_size", "context_length", "stop_token_ids", "logprob_semantics", "lineage", "policy_version", "max_running_samples", "num_running_samples", "build", "engine_build", "engine_settings", "admin_address", "num_weight_ranks", "transports", "instance_id")
    class EngineSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BUILD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_WEIGHT_RANKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_semantics: LogprobSemantics
    lineage: str
    policy_version: int
    max_running_samples: int
    num_running_samples: int
    build: str
    engine_build: str
    engine_settings: _containers.ScalarMap[str, str]
    admin_address: str
    num_weight_ranks: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    instance_id: str
    def __init__(self, model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., context_length: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprob_semantics: _Optional[_Union[LogprobSemantics, str]] = ..., lineage: _Optional[str] = ..., policy_version: _Optional[int] = ..., max_running_samples: _Optional[int] = ..., num_running_samples: _Optional[int] = ..., build: _Optional[str] = ..., engine_build: _Optional[str] = ..., engine_settings: _Optional[_Mapping[str, str]] = ..., admin_address: _Optional[str] = ..., num_weight_ranks: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "samples", "sampling", "min_policy_version", "exact_policy_version", "group_id", "progress_every_tokens")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_EVERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    sampling: SamplingParameters
    min_policy_version: int
    exact_policy_version: int
    group_id: str
    progress_every_tokens: int
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., min_policy_version: _Optional[int] = ..., exact_policy_version: _Optional[int] = ..., group_id: _Optional[str] = ..., progress_every_tokens: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("sample_id", "attempt", "seed")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    seed: int
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "max_tokens", "top_p", "top_k", "stop_token_ids", "ignore_stop_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_stop_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_stop_tokens: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("sample", "progress")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sample: Sample
    progress: SampleProgress
    def __init__(self, sample: _Optional[_Union[Sample, _Mapping]] = ..., progress: _Optional[_Union[SampleProgress, _Mapping]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("sample_id", "attempt", "token_ids", "behaviour_logprobs", "version_spans", "finish_reason", "stop_token_id", "num_cached_prompt_tokens")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    behaviour_logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    stop_token_id: int
    num_cached_prompt_tokens: int
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., behaviour_logprobs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("first_token", "policy_version")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    policy_version: int
    def __init__(self, first_token: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class SampleProgress(_message.Message):
    __slots__ = ("sample_id", "attempt", "num_tokens")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    attempt: int
    num_tokens: int
    def __init__(self, sample_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...
