//! The client's retry: one key for all attempts of an operation, what is sent again and what is not, and how an
//! operation ends.

#[path = "client_retry/answers.rs"]
mod answers;
#[path = "client_retry/bodies.rs"]
mod bodies;
#[path = "client_retry/ends.rs"]
mod ends;
#[cfg(unix)]
#[path = "client_retry/example.rs"]
mod example;
#[path = "client_retry/hook.rs"]
mod hook;
#[path = "client_retry/keys.rs"]
mod keys;
#[path = "client_retry/nested.rs"]
mod nested;
#[path = "client_retry/options.rs"]
mod options;
#[path = "client_retry/readiness.rs"]
mod readiness;
#[path = "client_retry/script.rs"]
mod script;
#[path = "client_retry/served.rs"]
mod served;
mod support;
#[path = "client_retry/tcp.rs"]
mod tcp;
#[path = "client_retry/wire.rs"]
mod wire;
