//! For drills only: time to send a duplicate, to hang up, or to pull the plug.

use std::{convert::Infallible, time::Duration};

use axum::{extract::FromRequestParts, http::request::Parts};

use super::refused::Refused;

/// The header `X-Simulate-Delay-Ms`. Handlers wait for it after the effect and before the answer, with
/// their transaction open and their rows locked.
///
/// Real code never waits there. A call to a provider inside an open transaction holds its locks and its
/// connection for as long as the provider likes, and a rollback does not take the call back. It belongs
/// between two short transactions.
pub struct Pause(Option<Duration>);

/// Less than the 10 s after which the server ends a transaction that stands idle.
const LONGEST_MS: u64 = 9_000;

impl<S: Send + Sync> FromRequestParts<S> for Pause {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let Some(value) = parts.headers.get("x-simulate-delay-ms") else {
            return Ok(Self(Some(Duration::ZERO)));
        };
        let millis = value.to_str().ok().and_then(|value| value.parse().ok());
        let millis = millis.filter(|millis| *millis <= LONGEST_MS);
        Ok(Self(millis.map(Duration::from_millis)))
    }
}

impl Pause {
    pub async fn take(self) -> Result<(), Refused> {
        let pause = self.0;
        let pause = pause.ok_or(Refused::unprocessable("delay_must_be_0_to_9000_ms"))?;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }
}
