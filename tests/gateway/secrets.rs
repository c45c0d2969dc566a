//! Upload tokens: in the answer to an order and in its replays, and nowhere else.

use crate::{shop::*, support::logs::Written};

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_token_is_neither_in_the_files_nor_in_the_log() {
    let log = Written::everywhere();
    let gateway = Gateway::open().await;
    let attempt = order("k3y", 25_000).header("pg-nonce", "n0nce").signed();
    let first = gateway.send(&attempt).await;
    assert_runs(&first, 201);
    let ordered = Ordered::of(&first);
    let large = gateway.send(&order("large", 10_000_000)).await;
    let large = Ordered::of(&large);
    let slip = ordered.slip("s", "image/png", &b"\x89PNG\r\n\x1a\n"[..]);
    assert_runs(&gateway.send(&slip).await, 201);
    let wrong = slip.clone().header("pg-upload-token", &large.token);
    assert_eq!(refused(&gateway.send(&wrong).await).0, 403);
    // Read again after the write, so that it has been opened as well.
    let retry = attempt.header("pg-nonce", "another").signed();
    let replay = gateway.send(&retry).await;
    assert_eq!(Ordered::of(&replay).token, ordered.token);
    let shown = get(&format!("{DEPOSITS}/{}", ordered.id));
    let shown = gateway.send(&shown).await;
    assert!(!holds(&shown.body, &ordered.token));

    for token in [&ordered.token, &large.token] {
        let secret = token.strip_prefix("upl_").unwrap();
        // While the files are in use, with what is not yet moved out of the write-ahead log.
        assert!(!holds(&gateway.files.bytes(), secret));
        assert!(!holds(&log.bytes(), secret));
    }
    // The search finds what is there.
    assert!(holds(&gateway.files.bytes(), &ordered.id));
    let log = log.bytes();
    assert!(holds(&log, &format!("{DEPOSITS}/{}/slip", ordered.id)));
    assert!(holds(&log, "TRACE") && holds(&log, "idempotency decision"));
    for secret in ["merchant-a", "k3y", "n0nce"] {
        assert!(!holds(&log, secret), "{secret} is in the log");
    }

    let files = gateway.close().await;
    assert!(!holds(&files.bytes(), &ordered.token));
    assert!(holds(&files.bytes(), &ordered.id));
}
