"""The gRPC options of both ends and the bounds that services share, in one place, so that they cannot disagree."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either end takes; gRPC's own default of 4 MiB is less than a group of long rollouts."""

MAX_ID_CHARACTERS = 128
"""Longest id of a group, a sample or an item that a service takes."""

Options = list[tuple[str, int]]

_SHARED: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it a stopped peer (SIGSTOP) is noticed only after 70 s, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]

SERVER_OPTIONS: Options = [
    *_SHARED,
    # Two servers could otherwise bind the same port and share its clients silently.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]

CHANNEL_OPTIONS: Options = [
    *_SHARED,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A proxy in the environment must not be asked for addresses of our own fleet.
    ("grpc.enable_http_proxy", 0),
]
