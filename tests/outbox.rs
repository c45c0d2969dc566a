//! Operations are durable before they are sent, and are sent with their first key and body, whatever happens.

#[path = "outbox/begun.rs"]
mod begun;
#[path = "outbox/contended.rs"]
mod contended;
#[path = "outbox/damaged.rs"]
mod damaged;
#[path = "outbox/ground.rs"]
mod ground;
#[path = "outbox/held.rs"]
mod held;
#[cfg(unix)]
#[path = "outbox/killed.rs"]
mod killed;
#[path = "outbox/late.rs"]
mod late;
#[path = "outbox/late_answers.rs"]
mod late_answers;
#[path = "outbox/relayed.rs"]
mod relayed;
#[cfg(feature = "sealing")]
#[path = "outbox/sealed.rs"]
mod sealed;
#[path = "outbox/settled.rs"]
mod settled;
mod support;
#[path = "outbox/told.rs"]
mod told;
#[path = "outbox/verdicts.rs"]
mod verdicts;
