//! Signatures and nonces: what each attempt has to get right, and none of it uses up a key.

use crate::{
    service::merchants,
    shop::{refused as said, *},
};

fn signature_invalid() -> (u16, String) {
    (401, "signature_invalid".to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signature_is_over_all_of_the_request() {
    let gateway = Gateway::open().await;
    let good = order("k", 25_000).header("pg-nonce", "n-1").signed();
    let signature = good.value("pg-signature").to_owned();
    let path = format!("{DEPOSITS}?a=1");
    let elsewhere = |method, path: &str| Call {
        method,
        path: path.to_owned(),
        ..good.clone()
    };
    let wrong = [
        elsewhere("POST", &path),
        elsewhere("GET", DEPOSITS),
        good.clone().key("other"),
        good.clone().without("idempotency-key"),
        good.clone().header("pg-nonce", "n-2"),
        good.clone().without("pg-nonce"),
        good.clone().body("{}"),
        good.clone().body(""),
        good.clone().by("merchant-b"),
        good.clone()
            .header("pg-signature", &signature.to_uppercase()),
        good.clone().header("pg-signature", &signature[1..]),
        good.clone().header("pg-signature", ""),
        good.clone().header("pg-signature", &"zz".repeat(32)),
        good.clone().signed_with(merchants::B.secret),
    ];
    for wrong in wrong {
        let reply = gateway.send(&wrong).await;
        assert_eq!(said(&reply), signature_invalid(), "{:?}", wrong.headers);
        assert_eq!(text(&reply, "www-authenticate"), "Bearer");
    }
    assert_eq!(gateway.records().await, 0);
    assert_eq!(gateway.count("deposits").await, 0);
    // None of them has used up the nonce.
    assert_runs(&gateway.send(&good).await, 201);
    let read = get(&format!("{DEPOSITS}?merchant_reference=INV-2026-0042"));
    assert_runs(&gateway.send(&read.signed()).await, 200);
}

// The mistake that merchants make: a 400 for the missing key would send them looking in the wrong place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_was_left_out_of_the_signature_or_of_the_request_is_a_wrong_signature() {
    let gateway = Gateway::open().await;
    let signed_without = order("k", 25_000).without("idempotency-key").signed();
    let reply = gateway.send(&signed_without.clone().key("k")).await;
    assert_eq!(said(&reply), signature_invalid());
    let sent_without = order("k", 25_000).signed().without("idempotency-key");
    let reply = gateway.send(&sent_without).await;
    assert_eq!(said(&reply), signature_invalid());
    // Where it is left out of both, the signature is right, and the layer has its say.
    let reply = gateway.send(&signed_without).await;
    assert_eq!(said(&reply), (400, "idempotency_key_required".to_owned()));
    // Also on an upload.
    let slip = gateway.order("k").await.slip("s", "image/png", "png");
    let reply = gateway
        .send(&slip.signed().without("idempotency-key"))
        .await;
    assert_eq!(said(&reply), signature_invalid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_attempt_has_a_nonce_of_its_own_and_all_have_the_key() {
    let gateway = Gateway::open().await;
    let attempt = |nonce: &str| order("k", 25_000).header("pg-nonce", nonce).signed();
    let first = gateway.send(&attempt("n-1")).await;
    assert_runs(&first, 201);
    assert_replays(&gateway.send(&attempt("n-2")).await, &first);
    for seen in ["n-1", "n-2"] {
        let reply = gateway.send(&attempt(seen)).await;
        assert_eq!(said(&reply), (401, "nonce_replayed".to_owned()));
        // Whatever else is sent with it, and signed or not.
        let unsigned = order("other", 99).header("pg-nonce", seen);
        assert_eq!(said(&gateway.send(&unsigned).await).1, "nonce_replayed");
    }
    // It is this merchant's nonce, whatever its credential, and nobody else's.
    let other_credential = attempt("n-1").by("merchant-a-2");
    let reply = gateway.send(&other_credential).await;
    assert_eq!(said(&reply).1, "nonce_replayed");
    let other = order("k", 25_000)
        .header("pg-nonce", "n-1")
        .by("merchant-b");
    let other = gateway.send(&other.signed_with(merchants::B.secret)).await;
    assert_runs(&other, 201);

    let long = gateway.send(&attempt(&"n".repeat(129))).await;
    assert_eq!(said(&long), (400, "request_invalid".to_owned()));
    assert_replays(&gateway.send(&attempt(&"n".repeat(128))).await, &first);
    // A restart forgets none.
    let files = gateway.close().await;
    let terms = Terms {
        files,
        ..Terms::default()
    };
    let gateway = Gateway::on(terms).await;
    let reply = gateway.send(&attempt("n-1")).await;
    assert_eq!(said(&reply).1, "nonce_replayed");
    assert_replays(&gateway.send(&attempt("n-3")).await, &first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_attempts_with_one_nonce_at_once_one_is_let_in() {
    let gateway = Gateway::open().await;
    for number in 0..10 {
        let attempt = |key: &str| {
            let nonce = format!("n-{number}");
            let key = format!("{key}-{number}");
            order(&key, 25_000).header("pg-nonce", &nonce).signed()
        };
        let (one, other) = (attempt("one"), attempt("other"));
        let (one, other) = tokio::join!(gateway.send(&one), gateway.send(&other));
        let (first, second) = match one.status {
            201 => (one, other),
            _ => (other, one),
        };
        assert_runs(&first, 201);
        assert_eq!(said(&second), (401, "nonce_replayed".to_owned()));
    }
    assert_eq!(gateway.count("deposits").await, 10);
}

// Worked out by another implementation. A change here locks every merchant out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signature_is_made_as_the_documentation_says() {
    let gateway = Gateway::open().await;
    let known = Call::new("POST", "/v1/pay/deposits")
        .key("order-17")
        .header("content-type", "application/json")
        .header("pg-nonce", "n-17")
        .header("pg-signature", GOLDEN)
        .body(r#"{"merchant_reference":"17","amount_minor":500,"currency":"THB","client":{"ip":"::1"}}"#);
    assert_runs(&gateway.send(&known).await, 201);
}

const GOLDEN: &str = "2fe25990b32a9308a4dfbd8e59023a66bc9e44af6c0bc5e1c07dbd9f822c4732";
