//! Server, client and plain curl: whoever asks gets the same, and everybody knows what it means.

mod support;

#[path = "client_agreement/callers.rs"]
mod callers;
#[path = "client_agreement/service.rs"]
mod service;
#[path = "client_agreement/situations.rs"]
mod situations;

use std::time::Duration;

use callers::{Asked, Caller, End, Got, curl};
use service::Service;
use situations::{Says, Situation};
use tower_idempotency::{
    IdempotencyStatus, Profile, Rejection,
    client::{Answered, RetryLayer, Unanswered},
};

const PROFILES: [Option<Profile>; 4] = [
    None,
    Some(Profile::Gateway),
    Some(Profile::Ietf),
    Some(Profile::Stripe),
];

/// The field in which this profile marks replays.
fn marker(profile: Option<Profile>) -> &'static str {
    match profile {
        Some(Profile::Stripe) => "idempotent-replayed",
        _ => "idempotent-replay",
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_server_and_curl_agree_on_every_answer() {
    for profile in PROFILES {
        for situation in situations::all(profile).await {
            let asked = situation.asked();
            let of_curl = curl(asked, Some(situation.keys[0])).await;
            let (of_client, end) = Caller::once().gets(asked, Some(situation.keys[1])).await;

            let what = format!("{profile:?}, {}, {}", situation.name, situation.path);
            assert_eq!(of_client, of_curl, "{what}");
            assert_eq!(end, situation.end, "{what}");
            let decided = Some(situation.says.decided());
            // One request each: nobody has asked twice.
            assert_eq!(situation.service.decided(), [decided, decided], "{what}");
            says(&situation, profile, &of_curl, &what);
        }
    }
}

// X2, X4
/// Status, code, hint and marker.
fn says(situation: &Situation, profile: Option<Profile>, got: &Got, what: &str) {
    assert_eq!(got.status, situation.says.status(profile), "{what}");
    let marked = matches!(situation.says, Says::Replays(_)).then_some("true");
    for name in ["idempotent-replay", "idempotent-replayed"] {
        let expected = marked.filter(|_| name == marker(profile));
        assert_eq!(got.header(name), expected, "{what}");
    }
    let Says::Refuses(rejection) = &situation.says else {
        let body = String::from_utf8_lossy(&got.body);
        assert!(body.contains(&situation.path[1..]), "{what}: {body}");
        assert_eq!(got.header("retry-after"), None, "{what}");
        return;
    };
    let is_envelope = matches!(profile, Some(Profile::Gateway));
    let kind = match is_envelope {
        true => "application/json",
        false => "application/problem+json",
    };
    assert_eq!(got.header("content-type"), Some(kind), "{what}");
    let said = got.refusal();
    assert_eq!(said["code"], rejection.code(), "{what}");
    let hint = rejection.retry_after_seconds();
    assert_eq!(said["retryable"], hint.is_some(), "{what}");
    assert_eq!(said["retry_after_seconds"].as_u64(), hint, "{what}");
    let header = got
        .header("retry-after")
        .map(|value| value.parse::<u64>().unwrap());
    assert_eq!(header, hint, "{what}");
    if let Rejection::InFlight { .. } = rejection {
        assert!(hint >= Some(1), "{what}");
    }
    if let Rejection::KeyReused { .. } = rejection {
        let text = said["message"]
            .as_str()
            .or(said["detail"].as_str())
            .unwrap();
        let place = format!("POST {}", situation.path);
        assert!(text.contains(&place) && !text.contains("999"), "{text}");
    }
}

/// Curl may leave its key out, which the client never does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_curl_has_no_key_the_client_makes_one_that_curl_can_use() {
    for profile in PROFILES {
        let service = Service::with(profile, |layer| layer).await;
        let asked = payment(&service);
        let of_curl = curl(asked, None).await;
        match profile {
            // Its keys are optional.
            Some(Profile::Stripe) => {
                assert_eq!((of_curl.status, service.decided()), (201, vec![None]));
            }
            _ => {
                assert_eq!(of_curl.status, 400);
                assert_eq!(of_curl.refusal()["code"], "idempotency_key_required");
                let missing = Some(IdempotencyStatus::Missing);
                assert_eq!(service.decided(), [missing]);
            }
        }
        let response = Caller::once().ask(asked, None).await.unwrap();
        let answered: &Answered = response.extensions().get().unwrap();
        assert!(!answered.replayed);
        let replay = curl(asked, answered.key.as_str()).await;
        assert_eq!(replay.status, 201);
        assert_eq!(replay.header(marker(profile)), Some("true"));
    }
}

fn payment(service: &Service) -> Asked {
    Asked {
        at: service.server.address,
        path: "/201",
        body: r#"{"amount":250}"#,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_in_quotation_marks_and_a_bare_one_are_the_same_key() {
    let service = Service::with(None, |layer| layer).await;
    let asked = payment(&service);
    let bare = Caller::once();
    let quoted = Caller::with(RetryLayer::new().retries(0).quoted());

    // Whoever comes first runs; the others get its answer.
    let first = curl(asked, Some("\"k-1\"")).await;
    assert_eq!(
        (first.status, first.header("idempotent-replay")),
        (201, None)
    );
    let replay = End::Answered { replayed: true };
    assert_eq!(bare.gets(asked, Some("k-1")).await.1, replay);
    assert_eq!(quoted.gets(asked, Some("k-1")).await.1, replay);

    let ran = End::Answered { replayed: false };
    assert_eq!(bare.gets(asked, Some("k-2")).await.1, ran);
    assert_eq!(quoted.gets(asked, Some("k-3")).await.1, ran);
    for key in ["\"k-2\"", "k-2", "\"k-3\"", "k-3"] {
        let got = curl(asked, Some(key)).await;
        assert_eq!(got.header("idempotent-replay"), Some("true"), "{key}");
    }
    assert_eq!(service.begun(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_one_spelling_only_says_so_to_both() {
    let bare = Caller::once();
    let quoted = Caller::with(RetryLayer::new().retries(0).quoted());
    let strict: [(Service, &Caller, &Caller, &str); 2] = [
        (
            Service::with(Some(Profile::Stripe), |layer| layer).await,
            &bare,
            &quoted,
            "\"k-1\"",
        ),
        (
            Service::with(None, |layer| {
                layer.key_format(tower_idempotency::KeyFormat::structured())
            })
            .await,
            &quoted,
            &bare,
            "k-1",
        ),
    ];
    for (service, right, wrong, misspelt) in &strict {
        let asked = payment(service);
        let of_curl = curl(asked, Some(misspelt)).await;
        let (of_client, end) = wrong.gets(asked, Some("k-1")).await;
        assert_eq!(of_client, of_curl);
        assert_eq!(of_client.refusal()["code"], "idempotency_key_invalid");
        // A refusal, and no outcome that somebody has recorded.
        assert_eq!(end, End::Answered { replayed: false });
        let (got, _) = right.gets(asked, Some("k-1")).await;
        assert_eq!((got.status, service.begun()), (201, 1));
    }
}

// X4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_run_goes_on_the_client_comes_back_no_earlier_than_it_is_told() {
    for profile in [None, Some(Profile::Gateway)] {
        let service = Service::with(profile, |layer| layer).await;
        service.hold("first", "{}").await;
        let asked = Asked {
            path: "/held",
            body: "{}",
            ..payment(&service)
        };
        let eager = Duration::from_millis(1);
        let caller = Caller::with(RetryLayer::new().retries(1).back_off(eager, eager));
        let begun = std::time::Instant::now();
        let end = caller.ask(asked, Some("first")).await.unwrap_err();
        assert!(matches!(&end, Unanswered::StillInFlight(ended) if ended.attempts() == 2));
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_secs(1), "hammered: {waited:?}");
        assert_eq!(service.decided(), [Some(IdempotencyStatus::InFlight); 2]);
    }
}
