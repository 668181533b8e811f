from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvOnCommit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_ON_COMMIT_UNSPECIFIED: _ClassVar[KvOnCommit]
    KV_ON_COMMIT_KEEP: _ClassVar[KvOnCommit]
    KV_ON_COMMIT_RECOMPUTE: _ClassVar[KvOnCommit]
KV_ON_COMMIT_UNSPECIFIED: KvOnCommit
KV_ON_COMMIT_KEEP: KvOnCommit
KV_ON_COMMIT_RECOMPUTE: KvOnCommit

class JoinGroupRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "store_host", "store_port", "world_size", "first_rank", "transport", "manifest", "timeout_seconds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    store_host: str
    store_port: int
    world_size: int
    first_rank: int
    transport: str
    manifest: WeightManifest
    timeout_seconds: float
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., world_size: _Optional[int] = ..., first_rank: _Optional[int] = ..., transport: _Optional[str] = ..., manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("tensors", "bucket_bytes", "digest")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[WeightTensor]
    bucket_bytes: int
    digest: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[WeightTensor, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class WeightTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinGroupResponse(_message.Message):
    __slots__ = ("policy_version", "lineage")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    lineage: str
    def __init__(self, policy_version: _Optional[int] = ..., lineage: _Optional[str] = ...) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("run_id", "epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaveGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageWeightsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "policy_version", "timeout_seconds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    policy_version: int
    timeout_seconds: float
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class StageWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "policy_version", "kv_on_commit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_ON_COMMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    policy_version: int
    kv_on_commit: KvOnCommit
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., kv_on_commit: _Optional[_Union[KvOnCommit, str]] = ...) -> None: ...

class CommitWeightsResponse(_message.Message):
    __slots__ = ("stopped_seconds", "apply_seconds", "num_requests_kept")
    STOPPED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_KEPT_FIELD_NUMBER: _ClassVar[int]
    stopped_seconds: float
    apply_seconds: float
    num_requests_kept: int
    def __init__(self, stopped_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ..., num_requests_kept: _Optional[int] = ...) -> None: ...

class AbortWeightsRequest(_message.Message):
    __slots__ = ("run_id", "epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class AbortWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
