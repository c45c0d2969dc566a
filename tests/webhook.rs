//! A delivery is answered with 2xx only once a run of its event has completed, whether the event is named in a
//! header or in the body.

mod support;

#[path = "webhook/broken_answers.rs"]
mod broken_answers;
#[path = "webhook/by_member.rs"]
mod by_member;
#[path = "webhook/deliveries.rs"]
mod deliveries;
#[path = "webhook/passing.rs"]
mod passing;
#[cfg(unix)]
#[path = "webhook/process.rs"]
mod process;
#[path = "webhook/routes.rs"]
mod routes;
#[path = "webhook/transactional.rs"]
mod transactional;
