//! Every situation that a keyed request can meet: how it is brought about, and what is to be said.

use tower_idempotency::{
    CanonicalJson, IdempotencyStatus, InvalidKey, KeyFormat, Profile, Rejection, UndecodableBody,
    testing::{Fault, Operation, Times},
};

use super::{
    callers::{Asked, End},
    service::{Layer, Service},
};

/// A service in which something has happened, and what two callers ask of it now.
pub struct Situation {
    pub name: &'static str,
    pub service: Service,
    pub path: &'static str,
    pub body: &'static str,
    /// The key that curl asks with, and the client's.
    pub keys: [&'static str; 2],
    pub says: Says,
    pub end: End,
}

/// What the server says, whoever asks.
pub enum Says {
    /// The answer of a run.
    Runs(u16),
    /// The answer of an earlier one, marked.
    Replays(u16),
    Refuses(Rejection),
}

impl Says {
    pub fn decided(&self) -> IdempotencyStatus {
        match self {
            Self::Runs(_) => IdempotencyStatus::Executed,
            Self::Replays(_) => IdempotencyStatus::Replayed,
            Self::Refuses(rejection) => rejection.idempotency_status(),
        }
    }

    pub fn status(&self, profile: Option<Profile>) -> u16 {
        match (self, profile) {
            (Self::Runs(status) | Self::Replays(status), _) => *status,
            (Self::Refuses(Rejection::KeyReused { .. }), Some(Profile::Ietf)) => 422,
            (Self::Refuses(Rejection::KeyReused { .. }), Some(Profile::Stripe)) => 400,
            (Self::Refuses(rejection), _) => rejection.status().as_u16(),
        }
    }
}

impl Situation {
    pub fn asked(&self) -> Asked {
        Asked {
            at: self.service.server.address,
            path: self.path,
            body: self.body,
        }
    }
}

const BODY: &str = r#"{"amount":250}"#;
const OTHER_BODY: &str = r#"{"amount":999}"#;

/// Both ask with the same key.
const SAME: [&str; 2] = ["first", "first"];
/// Each asks with a key that nobody has used.
const FRESH: [&str; 2] = ["curl-1", "client-1"];

const ANSWERED: End = End::Answered { replayed: false };
const REPLAYED: End = End::Answered { replayed: true };

pub async fn all(profile: Option<Profile>) -> Vec<Situation> {
    let mut all = first_answers(profile).await;
    all.extend(second_answers(profile).await);
    all.extend(refused_over_the_record(profile).await);
    all.extend(refused_over_the_request(profile).await);
    all.extend(refused_over_the_service(profile).await);
    all
}

async fn plain(profile: Option<Profile>) -> Service {
    Service::with(profile, |layer| layer).await
}

/// The path, what the client makes of its answer at first, and whether the record is kept.
fn answers(profile: Option<Profile>) -> [(&'static str, u16, End, bool); 4] {
    // A gateway's word is final, even where it refuses.
    let keeps_all = matches!(profile, Some(Profile::Gateway));
    [
        ("/201", 201, ANSWERED, true),
        ("/402", 402, ANSWERED, true),
        ("/422", 422, ANSWERED, keeps_all),
        // It may pass, until it is known to be the outcome.
        ("/500", 500, End::GaveUp, true),
    ]
}

async fn first_answers(profile: Option<Profile>) -> Vec<Situation> {
    let mut all = Vec::new();
    for (path, status, end, _) in answers(profile) {
        all.push(Situation {
            name: "a first answer",
            service: plain(profile).await,
            path,
            body: BODY,
            keys: FRESH,
            says: Says::Runs(status),
            end,
        });
    }
    all
}

async fn second_answers(profile: Option<Profile>) -> Vec<Situation> {
    let mut all = Vec::new();
    for (path, status, end, is_kept) in answers(profile) {
        let service = plain(profile).await;
        service.before(path, "first", BODY).await;
        let (says, end) = match is_kept {
            true => (Says::Replays(status), REPLAYED),
            false => (Says::Runs(status), end),
        };
        all.push(Situation {
            name: "the answer to a retry",
            service,
            path,
            body: BODY,
            keys: SAME,
            says,
            end,
        });
    }
    all
}

async fn refused_over_the_record(profile: Option<Profile>) -> Vec<Situation> {
    let used = plain(profile).await;
    used.before("/201", "first", BODY).await;
    let running = plain(profile).await;
    running.hold("first", BODY).await;
    let cut_off = plain(profile).await;
    cut_off.before("/cut-off", "first", BODY).await;
    let not_kept = plain(profile).await;
    not_kept.before("/not-kept", "first", BODY).await;

    let situation = |name, service, path, body, rejection, end| Situation {
        name,
        service,
        path,
        body,
        keys: SAME,
        says: Says::Refuses(rejection),
        end,
    };
    let nobody = None;
    vec![
        situation(
            "a key of another request",
            used,
            "/201",
            OTHER_BODY,
            Rejection::KeyReused {
                original_request_id: nobody.clone(),
            },
            End::Reused,
        ),
        situation(
            "a run that goes on",
            running,
            "/held",
            BODY,
            Rejection::InFlight {
                original_request_id: nobody.clone(),
            },
            End::StillInFlight,
        ),
        situation(
            "a run that was cut off",
            cut_off,
            "/cut-off",
            BODY,
            Rejection::OutcomeUnknown {
                original_request_id: nobody.clone(),
            },
            End::OutcomeUnknown,
        ),
        situation(
            "an answer that was not kept",
            not_kept,
            "/not-kept",
            BODY,
            Rejection::ResponseNotRetained {
                status: Some(axum::http::StatusCode::CREATED),
                original_request_id: nobody,
            },
            End::NotRetained(Some(201)),
        ),
    ]
}

async fn refused_over_the_request(profile: Option<Profile>) -> Vec<Situation> {
    let situation = async |name, options: fn(Layer) -> Layer, body, rejection| Situation {
        name,
        service: Service::with(profile, options).await,
        path: "/201",
        body,
        keys: FRESH,
        says: Says::Refuses(rejection),
        end: ANSWERED,
    };
    vec![
        situation(
            "a key of another form",
            |layer| layer.key_format(KeyFormat::uuid()),
            BODY,
            Rejection::KeyInvalid(InvalidKey::Format("a UUID")),
        )
        .await,
        situation(
            "a key without a scope",
            |layer| layer.scope(|_| None),
            BODY,
            Rejection::ScopeUnknown,
        )
        .await,
        situation(
            "too large a body",
            |layer| layer.request_body_limit(8),
            BODY,
            Rejection::BodyTooLarge { limit: Some(8) },
        )
        .await,
        situation(
            "a body that cannot be understood",
            |layer| layer.fingerprint(CanonicalJson::new()),
            r#"{"amount":250,"amount":999}"#,
            Rejection::BodyInvalid(UndecodableBody("a member stands there twice")),
        )
        .await,
    ]
}

async fn refused_over_the_service(profile: Option<Profile>) -> Vec<Situation> {
    let without_store = plain(profile).await;
    let store = &without_store.store;
    store.fail(Operation::Claim, Fault::Before, Times::Always);

    let busy = Service::with(profile, |layer| layer.max_running(1)).await;
    busy.hold("first", BODY).await;

    let full = Service::with(profile, |layer| layer.scope_limit(1)).await;
    // The limit is soft: it is known once the store has been asked.
    let mut keys = (0..1_000).map(|number| format!("filled-{number}"));
    while full
        .before("/201", &keys.next().unwrap(), BODY)
        .await
        .status
        != 429
    {}

    let situation = |name, service, rejection| Situation {
        name,
        service,
        path: "/201",
        body: BODY,
        keys: FRESH,
        says: Says::Refuses(rejection),
        end: End::GaveUp,
    };
    vec![
        situation(
            "a store out of reach",
            without_store,
            Rejection::StoreUnavailable,
        ),
        situation("too many runs", busy, Rejection::Overloaded),
        situation("too many keys", full, Rejection::LimitReached),
    ]
}
