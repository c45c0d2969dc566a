//! Operations are durable before they are sent, and are sent with their first key and body, whatever happens.

#[path = "outbox/begun.rs"]
mod begun;
#[path = "outbox/ground.rs"]
mod ground;
#[cfg(unix)]
#[path = "outbox/killed.rs"]
mod killed;
#[path = "outbox/relayed.rs"]
mod relayed;
#[cfg(feature = "sealing")]
#[path = "outbox/sealed.rs"]
mod sealed;
#[path = "outbox/settled.rs"]
mod settled;
mod support;
