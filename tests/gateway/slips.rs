//! Slips: the evidence is the request, however it is packed, and nothing that cannot be read is evidence.

use base64::{Engine, engine::general_purpose};
use serde_json::json;

use crate::shop::*;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const LIMIT: usize = 4 * 1024 * 1024;

/// An image of so many bytes, in which every value of a byte is, and each base64 character.
fn image(bytes: usize) -> Vec<u8> {
    let noise = (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8);
    PNG.iter().copied().chain(noise).take(bytes).collect()
}

fn json_slip(note: Option<&str>, base64: &str) -> String {
    match note {
        Some(note) => json!({ "note": note, "image_base64": base64 }).to_string(),
        None => json!({ "image_base64": base64 }).to_string(),
    }
}

fn base64(image: &[u8]) -> String {
    general_purpose::STANDARD.encode(image)
}

/// Content type and body of a form.
fn form(boundary: &str, parts: &[(&str, &[u8])]) -> (String, Vec<u8>) {
    let mut body = Vec::new();
    for (name, content) in parts {
        let head = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{boundary}\"\r\n\r\n"
        );
        body.extend(head.into_bytes());
        body.extend(*content);
        body.extend(b"\r\n");
    }
    body.extend(format!("--{boundary}--\r\n").into_bytes());
    (format!("multipart/form-data; boundary={boundary}"), body)
}

const JSON: &str = "application/json";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slip_is_the_same_one_however_it_is_packed() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let image = image(10_001);
    let standard = base64(&image);
    assert!(standard.ends_with('=') && standard.contains('+') && standard.contains('/'));
    let url_safe = general_purpose::URL_SAFE_NO_PAD.encode(&image);
    let lines = standard.as_bytes().chunks(76);
    let lines: Vec<_> = lines.map(|line| str::from_utf8(line).unwrap()).collect();

    let noted = [
        (
            JSON.to_owned(),
            json_slip(Some("paid"), &standard).into_bytes(),
        ),
        (
            JSON.to_owned(),
            json_slip(Some("paid"), &url_safe).into_bytes(),
        ),
        (
            JSON.to_owned(),
            json_slip(Some("paid"), &lines.join("\n")).into_bytes(),
        ),
        (
            JSON.to_owned(),
            json_slip(Some("paid"), &lines.join("\r\n")).into_bytes(),
        ),
        (
            "application/json; charset=utf-8".to_owned(),
            format!("{{ \"image_base64\" : \"{url_safe}\",\n \"note\" : \"p\\u0061id\" }}")
                .into_bytes(),
        ),
        form("one", &[("note", b"paid"), ("image", &image)]),
        form("two", &[("image", &image), ("note", b"paid")]),
    ];
    let bare = [
        ("image/png".to_owned(), image.clone()),
        ("image/jpeg".to_owned(), image.clone()),
        (JSON.to_owned(), json_slip(None, &standard).into_bytes()),
        (JSON.to_owned(), json_slip(Some(""), &standard).into_bytes()),
        (
            JSON.to_owned(),
            format!("{{\"note\":null,\"image_base64\":\"{standard}\"}}").into_bytes(),
        ),
        form("three", &[("image", &image)]),
        form("four", &[("image", &image), ("note", b"")]),
    ];
    for (key, packings) in [("noted", noted.as_slice()), ("bare", &bare)] {
        let (content_type, packed) = &packings[0];
        let first = ordered.slip(key, content_type, packed.clone());
        let first = gateway.send(&first).await;
        assert_runs(&first, 201);
        assert_eq!(body(&first)["bytes"], 10_001);
        assert_eq!(body(&first)["content_type"], "image/png");
        for (content_type, packed) in packings {
            let retry = ordered.slip(key, content_type, packed.clone());
            let retry = gateway.send(&retry).await;
            assert!(retry.is_replay(), "{content_type}: {retry:?}");
            assert_replays(&retry, &first);
        }
    }
    assert_eq!(gateway.count("slips").await, 2);
    let stored: Vec<u8> = sqlx::query_scalar("SELECT image FROM slips WHERE note = 'paid'")
        .fetch_one(&gateway.ledger)
        .await
        .unwrap();
    assert_eq!(stored, image);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_image_note_or_order_is_another_slip() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let elsewhere = gateway.order("k2").await;
    let image = image(1_000);
    let mut other_image = image.clone();
    other_image[999] ^= 1;
    let slip = |note: &str, image: &[u8]| json_slip(Some(note), &base64(image));
    let first = ordered.slip("s", JSON, slip("paid", &image));
    let first = gateway.send(&first).await;
    assert_runs(&first, 201);
    let longer = [&image[..], b"x"].concat();
    let (form_type, form) = form("b", &[("image", &image), ("note", b"paid ")]);
    let others = [
        ordered.slip("s", JSON, slip("paid", &other_image)),
        ordered.slip("s", JSON, slip("paid", &longer)),
        ordered.slip("s", JSON, slip("Paid", &image)),
        ordered.slip("s", &form_type, form),
        ordered.slip("s", "image/png", image.clone()),
        elsewhere.slip("s", JSON, slip("paid", &image)),
        // The keys of orders and slips are one merchant's keys.
        ordered.slip("k", JSON, slip("paid", &image)),
        order("s", 25_000),
    ];
    for other in others {
        let reply = gateway.send(&other).await;
        let expected = (409, "idempotency_key_reused".to_owned());
        assert_eq!(refused(&reply), expected, "{}", other.path);
    }
    assert_eq!(gateway.count("slips").await, 1);
    // Under keys of their own they are taken.
    let own = elsewhere.slip("s2", JSON, slip("paid", &image));
    assert_runs(&gateway.send(&own).await, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_of_four_mebibytes_passes_in_every_form_and_one_byte_more_in_none() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let wrapped = |image: &[u8]| {
        let base64 = base64(image);
        let lines = base64.as_bytes().chunks(64);
        let lines: Vec<_> = lines.map(|line| str::from_utf8(line).unwrap()).collect();
        json_slip(Some("paid"), &lines.join("\r\n")).into_bytes()
    };
    let largest = image(LIMIT);
    let packed = |image: &[u8]| {
        [
            ("image/png".to_owned(), image.to_vec()),
            form("boundary", &[("note", b"paid"), ("image", image)]),
            (JSON.to_owned(), wrapped(image)),
        ]
    };
    for (number, (content_type, packed)) in packed(&image(LIMIT + 1)).into_iter().enumerate() {
        let key = format!("s{number}");
        let over = ordered.slip(&key, &content_type, packed);
        let over = gateway.send(&over).await;
        assert_eq!(refused(&over), (413, "image_too_large".to_owned()));
    }
    for (number, (content_type, packed)) in packed(&largest).into_iter().enumerate() {
        // The key was not used up.
        let key = format!("s{number}");
        let slip = ordered.slip(&key, &content_type, packed);
        let first = gateway.send(&slip).await;
        assert_runs(&first, 201);
        assert_eq!(body(&first)["bytes"], LIMIT);
        assert_replays(&gateway.send(&slip).await, &first);
    }
    // No image needs so much, in whatever form.
    let endless = ordered.slip("s9", JSON, vec![b' '; 6 * 1024 * 1024 + 1]);
    let endless = gateway.send(&endless).await;
    assert_eq!(refused(&endless), (413, "body_too_large".to_owned()));
    assert_eq!(gateway.count("slips").await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_is_refused_and_leaves_the_key_free() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let records = gateway.records().await;
    let image = image(1_000);
    let good = base64(&image);
    let (form_type, form_body) = form("b", &[("image", &image)]);
    let cut = form_body[..form_body.len() - 10].to_vec();
    let two = form("b", &[("image", &image), ("image", &image)]);
    let unknown = form("b", &[("image", &image), ("amount", b"1")]);
    let imageless = form("b", &[("note", b"paid")]);
    let not_text = form("b", &[("image", &image), ("note", b"\xff")]);
    let json = |body: String| (JSON.to_owned(), body.into_bytes());
    let broken = [
        json(json_slip(None, &good[..good.len() - 3])),
        json(json_slip(None, "***")),
        json(json_slip(None, "")),
        json(json_slip(None, &base64(b"no image"))),
        json("{\"image_base64\":".to_owned()),
        json("{}".to_owned()),
        json("[]".to_owned()),
        json(String::new()),
        json(format!(
            "{{\"image_base64\":\"{good}\",\"image_base64\":\"{good}\"}}"
        )),
        json(format!("{{\"image_base64\":\"{good}\",\"amount\":1}}")),
        json(format!("{{\"image_base64\":\"{good}\",\"note\":1}}")),
        (form_type.clone(), cut),
        (form_type.clone(), Vec::new()),
        ("multipart/form-data".to_owned(), form_body.clone()),
        ("multipart/form-data; boundary=other".to_owned(), form_body),
        two,
        unknown,
        imageless,
        not_text,
        ("image/gif".to_owned(), image.clone()),
        ("text/plain".to_owned(), image.clone()),
        ("image/png".to_owned(), b"GIF89a".to_vec()),
        ("image/png".to_owned(), Vec::new()),
    ];
    for (content_type, packed) in broken {
        let shown = String::from_utf8_lossy(&packed[..packed.len().min(60)]).into_owned();
        let slip = ordered.slip("s", &content_type, packed);
        let reply = gateway.send(&slip).await;
        let expected = (400, "idempotency_body_invalid".to_owned());
        assert_eq!(refused(&reply), expected, "{content_type}: {shown}");
    }
    let untyped = ordered.slip("s", "", image.clone()).without("content-type");
    let untyped = gateway.send(&untyped).await;
    assert_eq!(refused(&untyped).1, "idempotency_body_invalid");
    assert_eq!(gateway.count("slips").await, 0);
    assert_eq!(gateway.records().await, records);
    let slip = ordered.slip("s", "image/png", image);
    assert_runs(&gateway.send(&slip).await, 201);
    let long = "n".repeat(1_001);
    let long = ordered.slip("s2", JSON, json_slip(Some(&long), &good));
    assert_eq!(refused(&gateway.send(&long).await).0, 422);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slip_needs_the_upload_token_of_its_order_and_so_does_its_replay() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let other = gateway.order("k2").await;
    let slip = ordered.slip("s", "image/png", image(1_000));
    let forbidden = [
        slip.clone().without("pg-upload-token"),
        slip.clone().header("pg-upload-token", ""),
        slip.clone().header("pg-upload-token", &other.token),
        slip.clone().header("pg-upload-token", &ordered.token[1..]),
    ];
    let denied = (403, "upload_token_invalid".to_owned());
    for call in &forbidden {
        assert_eq!(refused(&gateway.send(call).await), denied);
    }
    assert_eq!(gateway.count("slips").await, 0);
    let first = gateway.send(&slip).await;
    assert_runs(&first, 201);
    for call in &forbidden {
        assert_eq!(refused(&gateway.send(call).await), denied);
    }
    assert_replays(&gateway.send(&slip).await, &first);
    let nowhere = Call {
        path: format!("{DEPOSITS}/dep_0/slip"),
        ..slip.clone()
    };
    assert_eq!(refused(&gateway.send(&nowhere).await).0, 404);

    // 24 h and 20 min later.
    let later = "UPDATE deposits SET created_at_ms = created_at_ms - 87600000";
    sqlx::query(later).execute(&gateway.ledger).await.unwrap();
    assert_eq!(refused(&gateway.send(&slip).await), denied);
}

// The layer has lost its record. The row has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slip_whose_record_was_lost_is_not_taken_twice() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let slip = ordered.slip("s", "image/png", image(1_000));
    let first = gateway.send(&slip).await;
    assert_runs(&first, 201);
    let lose = sqlx::query("DELETE FROM idempotency_records").execute(&gateway.ledger);
    assert!(lose.await.unwrap().rows_affected() > 0);
    let again = gateway.send(&slip).await;
    assert_eq!(refused(&again), (409, "already_done".to_owned()));
    assert_eq!(body(&again)["error"]["details"]["id"], body(&first)["id"]);
    assert_eq!(gateway.count("slips").await, 1);
}
