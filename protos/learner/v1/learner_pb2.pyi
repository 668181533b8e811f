from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_KIND_UNSPECIFIED: _ClassVar[ServerKind]
    SERVER_KIND_ROLLOUT: _ClassVar[ServerKind]
    SERVER_KIND_REWARD: _ClassVar[ServerKind]

class LearnerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEARNER_PHASE_UNSPECIFIED: _ClassVar[LearnerPhase]
    LEARNER_PHASE_STARTING: _ClassVar[LearnerPhase]
    LEARNER_PHASE_WAITING: _ClassVar[LearnerPhase]
    LEARNER_PHASE_TRAINING: _ClassVar[LearnerPhase]
    LEARNER_PHASE_PUSHING: _ClassVar[LearnerPhase]
    LEARNER_PHASE_DONE: _ClassVar[LearnerPhase]
SERVER_KIND_UNSPECIFIED: ServerKind
SERVER_KIND_ROLLOUT: ServerKind
SERVER_KIND_REWARD: ServerKind
LEARNER_PHASE_UNSPECIFIED: LearnerPhase
LEARNER_PHASE_STARTING: LearnerPhase
LEARNER_PHASE_WAITING: LearnerPhase
LEARNER_PHASE_TRAINING: LearnerPhase
LEARNER_PHASE_PUSHING: LearnerPhase
LEARNER_PHASE_DONE: LearnerPhase

class RegisterServerRequest(_message.Message):
    __slots__ = ("kind", "address", "instance_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    kind: ServerKind
    address: str
    instance_id: str
    def __init__(self, kind: _Optional[_Union[ServerKind, str]] = ..., address: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class RegisterServerResponse(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[KnownServer]
    def __init__(self, servers: _Optional[_Iterable[_Union[KnownServer, _Mapping]]] = ...) -> None: ...

class KnownServer(_message.Message):
    __slots__ = ("kind", "address", "is_ready", "policy_version", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: ServerKind
    address: str
    is_ready: bool
    policy_version: int
    reason: str
    def __init__(self, kind: _Optional[_Union[ServerKind, str]] = ..., address: _Optional[str] = ..., is_ready: bool = ..., policy_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("run_id", "phase", "policy_version", "num_steps", "checkpoint_step", "samples_issued")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_ISSUED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: LearnerPhase
    policy_version: int
    num_steps: int
    checkpoint_step: int
    samples_issued: int
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[LearnerPhase, str]] = ..., policy_version: _Optional[int] = ..., num_steps: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., samples_issued: _Optional[int] = ...) -> None: ...

class RequestCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestCheckpointResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...
