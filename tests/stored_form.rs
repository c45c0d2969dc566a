//! What was written by one version is read by all later ones, and damage is noticed and never
//! panics.

mod support;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use proptest::prelude::*;
use support::*;
use tower_idempotency::{DecodeError, IdempotencyLayer, RetainedResponse};

fn response(status: u16, fields: &[(&'static str, &[u8])], body: &[u8]) -> RetainedResponse {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let value = HeaderValue::from_bytes(value).unwrap();
        headers.append(HeaderName::from_static(name), value);
    }
    RetainedResponse {
        status: StatusCode::from_u16(status).unwrap(),
        headers,
        body: Bytes::copy_from_slice(body),
    }
}

/// Committed bytes and what they mean. Records that live in somebody's database look like these:
/// never change a file, add new ones.
fn fixtures() -> [(&'static [u8], RetainedResponse); 5] {
    let every_byte: Vec<u8> = (0..=255).collect();
    [
        (
            include_bytes!("fixtures/retained-v1-empty.bin"),
            response(204, &[], b""),
        ),
        (
            include_bytes!("fixtures/retained-v1-created.bin"),
            response(
                201,
                &[
                    ("location", b"/charges/1"),
                    ("etag", b"W/\"1\""),
                    ("content-type", b"application/json"),
                ],
                b"{\"charge\":1}",
            ),
        ),
        (
            include_bytes!("fixtures/retained-v1-repeated.bin"),
            response(
                200,
                &[
                    ("link", b"</a>; rel=\"next\""),
                    ("link", b"</b>; rel=\"prev\""),
                    ("link", b"</a>; rel=\"next\""),
                    ("x-empty", b""),
                    ("vary", b"accept"),
                    ("vary", b"origin"),
                ],
                b"made",
            ),
        ),
        (
            include_bytes!("fixtures/retained-v1-obs-text.bin"),
            response(
                402,
                &[
                    ("x-odd", b"\xC3\xA5"),
                    ("x-odd", b"\xFF\x80"),
                    ("x-tab", b"a\tb"),
                ],
                b"\xC3\x28\xFF",
            ),
        ),
        (
            include_bytes!("fixtures/retained-v1-every-byte.bin"),
            response(
                599,
                &[("content-type", b"application/octet-stream")],
                &every_byte,
            ),
        ),
    ]
}

#[test]
fn what_version_1_wrote_is_read_and_would_be_written_again_byte_for_byte() {
    for (stored, expected) in fixtures() {
        let decoded = RetainedResponse::decode(Bytes::from_static(stored)).unwrap();
        assert_eq!(decoded.status, expected.status);
        assert_eq!(decoded.headers, expected.headers);
        assert_eq!(decoded.body, expected.body);
        assert_eq!(decoded.encode(), stored);
        assert_eq!(expected.encode(), stored);
        // Repeated fields in their order, which comparing maps alone would not show.
        let lines = |headers: &HeaderMap| -> Vec<_> {
            headers
                .iter()
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect()
        };
        assert_eq!(lines(&decoded.headers), lines(&expected.headers));
    }
}

#[test]
fn a_version_that_is_not_known_is_named() {
    for version in [0, 3, 255] {
        let mut stored = fixtures()[1].0.to_vec();
        stored[0] = version;
        let decoded = RetainedResponse::decode(stored.into());
        assert_eq!(decoded, Err(DecodeError::Version(version)));
    }
    let error = DecodeError::Version(9).to_string();
    assert!(error.contains('9') && error.contains("newer"), "{error}");
}

/// The answer of `retained-v1-created.bin`, sealed for the scope `merchant-7` and the key `order-17` with the
/// key `2026-12`, which is 32 times `0x11`.
const SEALED: &[u8] = include_bytes!("fixtures/retained-v2-created.bin");

#[test]
fn a_sealed_answer_is_known_for_one_by_who_has_no_key() {
    let decode = |stored: &[u8]| RetainedResponse::decode(Bytes::copy_from_slice(stored));
    let error = decode(SEALED).unwrap_err();
    let key_id = "2026-12".into();
    assert_eq!(error, DecodeError::Sealed { key_id });
    let text = error.to_string();
    assert!(
        text.contains("2026-12") && text.contains("SealedStore"),
        "{text}"
    );
    // Up to where a nonce and a tag would have their place.
    for length in 0..9 + 24 + 16 {
        assert_eq!(
            decode(&SEALED[..length]),
            Err(DecodeError::Damaged),
            "{length}"
        );
    }
    // An id that no key can have is not shown.
    for id in [
        &b"\x02\x03a\nb"[..],
        b"\x02\x03a\xFFb",
        b"\x02\x03a b",
        b"\x02\x00",
        b"\x02\x41",
    ] {
        let mut stored = id.to_vec();
        stored.resize(200, b'x');
        assert_eq!(decode(&stored), Err(DecodeError::Damaged), "{id:?}");
    }
}

#[cfg(feature = "sealing")]
mod sealed {
    use std::time::Duration;

    use chacha20poly1305::{
        KeyInit, XChaCha20Poly1305,
        aead::{Aead, Payload},
    };
    use tower_idempotency::{
        Fingerprint, IdempotencyKey, MemoryStore, RecordId, Scope, SealedStore, SealingKeys,
        store::{
            Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Store,
            Ticket,
        },
    };

    use super::*;

    const KEY: [u8; 32] = [0x11; 32];
    /// The five bytes `value`, for the same record and key, under the name `step`.
    const CHECKPOINT: &[u8] = include_bytes!("fixtures/checkpoint-v2-step.bin");

    fn id() -> RecordId {
        let key = IdempotencyKey::new("order-17");
        RecordId::new(Scope::new("merchant-7"), key)
    }

    async fn claimed(store: &MemoryStore) -> Ticket {
        let claim = ClaimRequest::new(id(), "test", Fingerprint::from_bytes([5; 32]));
        match store.claim(claim).await.unwrap() {
            Claim::Won(ticket) => ticket,
            other => panic!("not won: {other:?}"),
        }
    }

    #[tokio::test]
    async fn what_version_2_wrote_is_opened() {
        let bare = MemoryStore::new();
        let keys = SealingKeys::new("2027-12", [0x22; 32]).also_opens("2026-12", KEY);
        let store = SealedStore::open(bare.clone(), keys).await.unwrap();
        let ticket = claimed(&bare).await;
        let value = Bytes::from_static(CHECKPOINT);
        assert_eq!(
            bare.save(&ticket, "step", value).await.unwrap(),
            Settled::Done
        );
        let loaded = store.load(&ticket).await.unwrap().unwrap();
        assert_eq!(&loaded[0].value[..], b"value");
        let done = Completion::retained(StatusCode::CREATED, Bytes::from_static(SEALED));
        let settled = bare.complete(&ticket, done, Lifetimes::new(Duration::from_secs(60)));
        assert_eq!(settled.await.unwrap(), Settled::Done);
        let record = store.get(&id()).await.unwrap().unwrap();
        let (plain, expected) = &fixtures()[1];
        assert_eq!(record.response.as_deref(), Some(*plain));
        let decoded = RetainedResponse::decode(record.response.unwrap());
        assert_eq!(decoded.as_ref(), Ok(expected));
    }

    /// The form as it is described, read without this crate.
    fn by_the_book(stored: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        assert_eq!(&stored[..9], b"\x02\x072026-12");
        let nonce: [u8; 24] = stored[9..33].try_into().unwrap();
        let mut aad = Vec::new();
        for part in parts {
            aad.extend((part.len() as u64).to_be_bytes());
            aad.extend(*part);
        }
        let sealed = Payload {
            msg: &stored[33..],
            aad: &aad,
        };
        let cipher = XChaCha20Poly1305::new(&KEY.into());
        cipher.decrypt(&nonce.into(), sealed).unwrap()
    }

    #[tokio::test]
    async fn it_is_written_as_it_is_described() {
        let book = |stored: &[u8]| {
            let domain = b"tower-idempotency sealed response 2";
            by_the_book(stored, &[domain, b"2026-12", b"merchant-7", b"order-17"])
        };
        let plain = fixtures()[1].0;
        assert_eq!(book(SEALED), plain);
        let domain = b"tower-idempotency sealed checkpoint 2";
        let parts: [&[u8]; 5] = [domain, b"2026-12", b"merchant-7", b"order-17", b"step"];
        assert_eq!(by_the_book(CHECKPOINT, &parts), b"value");

        // What is written today is no different, and never twice the same.
        let bare = MemoryStore::new();
        let keys = SealingKeys::new("2026-12", KEY);
        let store = SealedStore::open(bare.clone(), keys).await.unwrap();
        let mut written = Vec::new();
        for _ in 0..2 {
            let ticket = claimed(&bare).await;
            let done = Completion::retained(StatusCode::CREATED, Bytes::from_static(plain));
            let settled = store.complete(&ticket, done, Lifetimes::new(Duration::from_secs(60)));
            assert_eq!(settled.await.unwrap(), Settled::Done);
            let record = bare.get(&id()).await.unwrap().unwrap();
            let stored = record.response.unwrap();
            assert_eq!(
                (book(&stored), stored.len()),
                (plain.to_vec(), SEALED.len())
            );
            written.push(stored);
            assert!(bare.forget(&id()).await.unwrap());
        }
        assert_ne!(written[0][9..33], written[1][9..33]);
        assert_ne!(written[0], written[1]);
    }
}

#[test]
fn whatever_is_cut_off_or_added_is_damage() {
    for (stored, _) in fixtures() {
        for length in 0..stored.len() {
            let cut = Bytes::copy_from_slice(&stored[..length]);
            assert_eq!(
                RetainedResponse::decode(cut),
                Err(DecodeError::Damaged),
                "{length}"
            );
        }
        let longer = [stored, b"\0"].concat();
        assert_eq!(
            RetainedResponse::decode(longer.into()),
            Err(DecodeError::Damaged)
        );
    }
}

#[test]
fn no_flipped_bit_panics() {
    for (stored, _) in fixtures() {
        for bit in 0..stored.len() * 8 {
            let mut flipped = stored.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let _ = RetainedResponse::decode(flipped.into());
        }
    }
}

#[test]
fn lengths_and_counts_that_lie_are_damage_and_reserve_nothing() {
    let head = |count: u16| [&[1, 0, 200][..], &count.to_be_bytes()].concat();
    let lies = [
        head(u16::MAX),
        [head(0), u64::MAX.to_be_bytes().to_vec()].concat(),
        [head(0), (i64::MAX as u64).to_be_bytes().to_vec()].concat(),
        [
            head(1),
            b"\0\x01a".to_vec(),
            u32::MAX.to_be_bytes().to_vec(),
        ]
        .concat(),
        [head(1), u16::MAX.to_be_bytes().to_vec(), b"a".to_vec()].concat(),
        // Names and values HTTP does not allow.
        [head(1), b"\0\0\0\0\0\0".to_vec(), vec![0; 8]].concat(),
        [head(1), b"\0\x01 \0\0\0\0".to_vec(), vec![0; 8]].concat(),
        [head(1), b"\0\x01a\0\0\0\x01\n".to_vec(), vec![0; 8]].concat(),
        // A status that is none.
        [vec![1, 0, 99, 0, 0], vec![0; 8]].concat(),
        [vec![1, 3, 232, 0, 0], vec![0; 8]].concat(),
        // As many fields as can be counted, in as many bytes as they would need.
        [head(u16::MAX), vec![0; 6 * 65_536]].concat(),
        [head(40_000), b"\0\x01a\0\0\0\0".repeat(39_999)].concat(),
    ];
    for (n, stored) in lies.into_iter().enumerate() {
        let decoded = RetainedResponse::decode(stored.into());
        assert_eq!(decoded, Err(DecodeError::Damaged), "{n}");
    }
}

#[test]
fn a_response_with_very_many_fields_comes_back_whole() {
    let mut many = response(200, &[], b"body");
    for n in 0..300 {
        let name = HeaderName::try_from(format!("x-{n}")).unwrap();
        many.headers.append(name, HeaderValue::from(n));
    }
    for n in 0..40_000 {
        many.headers.append("link", HeaderValue::from(n));
    }
    let long = HeaderValue::from_bytes(&[b'v'; 70_000]).unwrap();
    many.headers.append("x-long", long);
    assert_eq!(RetainedResponse::decode(many.encode()), Ok(many));
}

every_store! {
    async fn an_answer_with_more_fields_than_can_be_kept_leaves_a_tombstone(world: World) {
        let handler = Handler::answering(|seen| {
            let fields: usize = seen.uri.path()[1..].parse().unwrap();
            let mut response = http::Response::new(Body::from("body"));
            for n in 0..fields {
                response.headers_mut().append("link", HeaderValue::from(n));
            }
            response
        });
        let app = handler.behind(IdempotencyLayer::new(world.open().await).single_tenant());
        for (fields, is_kept) in [(16_384, true), (16_385, false), (70_000, false)] {
            let uri = format!("/{fields}");
            let first = send(&app, request("POST", &uri, Some(&uri), "A")).await;
            let links = first.headers.get_all("link").iter().count();
            assert_eq!((links, &first.body[..]), (fields, &b"body"[..]));
            let retry = send(&app, request("POST", &uri, Some(&uri), "A")).await;
            assert_eq!(retry.replay, is_kept, "{fields}");
            if !is_kept {
                assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
            }
        }
        assert_eq!(handler.effects(), 3);
    }
}

/// Any response HTTP allows, repeated fields likely.
fn responses() -> impl Strategy<Value = RetainedResponse> {
    let name = prop_oneof!["[a-z0-9!#$%&'*+.^_`|~-]{1,20}", "[a-c]"];
    let byte = prop_oneof![Just(b'\t'), 0x20..=0x7eu8, 0x80..=0xffu8];
    let value = prop::collection::vec(byte, 0..40);
    let fields = prop::collection::vec((name, value), 0..20);
    let body = prop::collection::vec(any::<u8>(), 0..300);
    (100..1000_u16, fields, body).prop_map(|(status, fields, body)| {
        let mut response = response(status, &[], &body);
        for (name, value) in fields {
            let name = HeaderName::try_from(name).unwrap();
            let value = HeaderValue::from_bytes(&value).unwrap();
            response.headers.append(name, value);
        }
        response
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_encoded_decodes_to_the_same(response in responses()) {
        let stored = response.encode();
        let decoded = RetainedResponse::decode(stored.clone()).unwrap();
        prop_assert_eq!(&decoded, &response);
        prop_assert_eq!(decoded.encode(), stored);
    }

    #[test]
    fn any_bytes_decode_or_are_refused(
        mut stored in prop::collection::vec(any::<u8>(), 0..200),
        version in any::<bool>(),
    ) {
        if version && !stored.is_empty() {
            stored[0] = 1;
        }
        let _ = RetainedResponse::decode(stored.into());
    }

    #[test]
    fn damage_never_panics_and_what_is_cut_off_is_always_noticed(
        response in responses(),
        cut in any::<prop::sample::Index>(),
        flips in prop::collection::vec(any::<prop::sample::Index>(), 1..5),
    ) {
        let stored = response.encode();
        let cut = stored.slice(..cut.index(stored.len()));
        prop_assert_eq!(RetainedResponse::decode(cut), Err(DecodeError::Damaged));
        let mut flipped = stored.to_vec();
        for flip in flips {
            let bit = flip.index(flipped.len() * 8);
            flipped[bit / 8] ^= 1 << (bit % 8);
        }
        let _ = RetainedResponse::decode(flipped.into());
    }
}
