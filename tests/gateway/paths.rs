//! Paths and methods that the gateway does not have: its envelope there too, and no business of the layer's.

use crate::shop::*;

fn not_found() -> (u16, String) {
    (404, "not_found".to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_is_no_text_is_one_that_does_not_exist() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let place = format!("{DEPOSITS}/%ff");
    assert_eq!(refused(&gateway.send(&get(&place)).await), not_found());
    let slip = Call {
        path: format!("{place}/slip"),
        ..ordered.slip("s", "image/png", &b"\x89PNG\r\n\x1a\n"[..])
    };
    assert_eq!(refused(&gateway.send(&slip).await), not_found());
    // Who is not let in does not learn even that.
    for call in [get(&place), slip] {
        let outsider = gateway.send(&call.by("nobody")).await;
        assert_eq!(refused(&outsider), (401, "unauthorized".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_that_is_none_is_not_found_with_a_key_or_without() {
    let gateway = Gateway::open().await;
    let nowhere = ["/", "/v1/pay/deposit", "/v1/pay/deposits/", "/%ff"];
    for nowhere in nowhere {
        let keyed = Call {
            path: nowhere.to_owned(),
            ..order("k", 25_000)
        };
        // The layer would refuse the first for its missing key, and replay the third.
        for call in [
            keyed.clone().without("idempotency-key"),
            keyed.clone(),
            keyed,
        ] {
            let reply = gateway.send(&call).await;
            assert_eq!(refused(&reply), not_found(), "{nowhere}");
            assert!(!reply.is_replay());
        }
        assert_eq!(refused(&gateway.send(&get(nowhere)).await), not_found());
    }
    assert_eq!(gateway.records().await, 0);
    assert_runs(&gateway.send(&order("k", 25_000)).await, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_method_that_a_path_does_not_have_is_answered_with_those_it_has() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let records = gateway.records().await;
    let place = format!("{DEPOSITS}/{}", ordered.id);
    let slip = format!("{place}/slip");
    let wrong = [
        ("PUT", DEPOSITS, "POST,GET,HEAD"),
        ("DELETE", DEPOSITS, "POST,GET,HEAD"),
        ("POST", &place, "GET,HEAD"),
        ("PATCH", &place, "GET,HEAD"),
        ("GET", &slip, "POST"),
    ];
    for (method, path, allowed) in wrong {
        // With a key, whatever it is, and without.
        let call = Call::new(method, path);
        for call in [call.clone().key("s"), call.clone().key("a,b"), call] {
            let reply = gateway.send(&call).await;
            let expected = (405, "method_not_allowed".to_owned());
            assert_eq!(refused(&reply), expected, "{method} {path}");
            let mut allow: Vec<_> = text(&reply, "allow").split(',').collect();
            let mut allowed: Vec<_> = allowed.split(',').collect();
            allow.sort_unstable();
            allowed.sort_unstable();
            assert_eq!(allow, allowed, "{method} {path}");
        }
    }
    assert_eq!(gateway.records().await, records);
}
