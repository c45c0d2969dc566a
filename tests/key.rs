//! A key is read by one rule, a malformed one is never treated as absent, and a refusal costs
//! neither a store call nor a read of the body.

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{HeaderName, Method, Request, StatusCode},
};
use bytes::Bytes;
use http::request::Parts;
use proptest::prelude::*;
use support::{bodies::Pieces, wire::Server, *};
use tower::Layer;
use tower_idempotency::{
    AnyStore, Fingerprint, FingerprintScheme, IdempotencyLayer, InFlight, InvalidKey, KeyFormat,
    MemoryStore, Recovery, Scheme, Scope, SqliteStore, UndecodableBody,
    testing::{FaultyStore, Operation},
};

/// A POST with these header lines, byte for byte.
fn raw(lines: &[&[u8]]) -> Vec<u8> {
    let mut request = b"POST /charges HTTP/1.1\r\nhost: test\r\ncontent-length: 1\r\n".to_vec();
    for line in lines {
        request.extend_from_slice(line);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\nA");
    request
}

/// One server that requires keys and one where they are optional, over one store and handler.
struct Servers {
    handler: Handler,
    store: TestStore,
    required: Server,
    optional: Server,
}

impl Servers {
    async fn start(world: &World) -> Self {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant();
        let required = Server::start(handler.behind(layer.clone())).await;
        let optional = Server::start(handler.behind(layer.optional())).await;
        Self {
            handler,
            store,
            required,
            optional,
        }
    }

    /// Asserts that both refuse this as malformed and that nothing came of it.
    async fn assert_invalid(&self, request: &[u8]) {
        for server in [&self.required, &self.optional] {
            let reply = server.exchange(request).await;
            let shown = String::from_utf8_lossy(request);
            assert_eq!(
                reply.said(),
                (400, "idempotency_key_invalid".into()),
                "{shown}"
            );
        }
        assert_eq!(self.handler.effects(), 0);
        assert_eq!(self.store.total_calls(), 0);
        assert_eq!(records(&self.store).await, 0);
    }
}

every_store! {
    // K1
    async fn more_than_one_key_is_refused_and_leaves_each_key_free(world: World) {
        let servers = Servers::start(&world).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: K", b"idempotency-key: K"])).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: K", b"Idempotency-Key: J"])).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: K", b"idempotency-key:"])).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: \"K\", \"J\""])).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: K, J"])).await;

        let clean = servers.required.exchange(&raw(&[b"idempotency-key: K"])).await;
        assert_eq!((clean.status, clean.is_replay()), (201, false));
        let again = servers.required.exchange(&raw(&[b"idempotency-key: K"])).await;
        assert!(again.is_replay());
        assert_eq!(servers.handler.effects(), 1);
    }

    // K2
    async fn a_malformed_key_is_refused_where_keys_are_optional_too(world: World) {
        let servers = Servers::start(&world).await;
        for value in [
            &b"\"abc"[..], b"\"abc\" x", b"\"abc\"\"", b"\"abc\\\"", b"'abc'", b"a b", b"a;b", b"a\\b", b"a\"b", b"a'b",
        ] {
            servers.assert_invalid(&raw(&[&[b"idempotency-key: ", value].concat()])).await;
        }
    }

    // K3
    async fn escapes_are_decoded_and_quoted_and_bare_spelling_meet_in_one_record(world: World) {
        let servers = Servers::start(&world).await;
        servers.assert_invalid(&raw(&[br#"idempotency-key: "a\nb""#])).await;

        let server = &servers.required;
        let bare = server.exchange(&raw(&[b"idempotency-key: abc"])).await;
        assert_eq!((bare.status, bare.is_replay()), (201, false));
        for spelling in [&br#""abc""#[..], br#""abc";v=1"#, br#"  "abc"  "#, b"abc"] {
            let retry = server.exchange(&raw(&[&[b"idempotency-key: ", spelling].concat()])).await;
            assert!(retry.is_replay());
            assert_eq!(retry.body, bare.body);
        }
        assert_eq!(servers.handler.effects(), 1);
        assert_eq!(records(&servers.store).await, 1);

        server.exchange(&raw(&[br#"idempotency-key: "a\"b""#])).await;
        server.exchange(&raw(&[br#"idempotency-key: "a\\b""#])).await;
        assert_eq!(servers.handler.effects(), 3);
        assert!(record(&servers.store, r#"a"b"#).await.is_some());
        assert!(record(&servers.store, r"a\b").await.is_some());
    }

    // K5
    async fn a_blank_key_is_refused_where_keys_are_optional_too(world: World) {
        let servers = Servers::start(&world).await;
        for line in [
            &b"idempotency-key:"[..], b"idempotency-key: ", b"idempotency-key:     ",
            b"idempotency-key: \t", b"idempotency-key: \"\"", b"idempotency-key: \" \"",
        ] {
            servers.assert_invalid(&raw(&[line])).await;
        }
        // Without the header at all, optional means optional.
        let reply = servers.optional.exchange(&raw(&[])).await;
        assert_eq!((reply.status, reply.is_replay()), (201, false));
        assert_eq!(records(&servers.store).await, 0);
        let reply = servers.required.exchange(&raw(&[])).await;
        assert_eq!(reply.said(), (400, "idempotency_key_required".into()));
        assert_eq!(servers.handler.effects(), 1);
    }

    // K6
    async fn a_key_may_have_255_decoded_bytes_and_no_more(world: World) {
        let servers = Servers::start(&world).await;
        let long = "a".repeat(256);
        servers.assert_invalid(&raw(&[format!("idempotency-key: {long}").as_bytes()])).await;
        servers.assert_invalid(&raw(&[format!("idempotency-key: \"{long}\"").as_bytes()])).await;

        // 255 decoded bytes, twice as many on the wire.
        let escaped = "\\\"".repeat(255);
        for value in ["a".repeat(255), format!("\"{}\"", "b".repeat(255)), format!("\"{escaped}\"")] {
            let request = raw(&[format!("idempotency-key: {value}").as_bytes()]);
            assert_eq!(servers.required.exchange(&request).await.status, 201);
            assert!(servers.required.exchange(&request).await.is_replay());
        }
        assert_eq!(servers.handler.effects(), 3);
    }

    // K6
    async fn a_refused_key_costs_no_store_call_and_no_read_of_the_body(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
        let long = "a".repeat(256);
        for key in [None, Some(""), Some("\"abc"), Some("a\tb"), Some(&long[..])] {
            let body = Pieces::endless("x");
            let taken = body.taken();
            let answer = send(&app, request("POST", "/charges", key, body.body())).await;
            assert_eq!(answer.status, 400, "{key:?}");
            assert_eq!(taken.load(Ordering::SeqCst), 0, "{key:?}");
        }
        assert_eq!(handler.effects(), 0);
        assert_eq!(store.total_calls(), 0);
        assert_eq!(records(&store).await, 0);
    }

    // K6
    async fn control_characters_in_a_key_are_refused(world: World) {
        let servers = Servers::start(&world).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: a\tb"])).await;
        servers.assert_invalid(&raw(&[b"idempotency-key: \"a\tb\""])).await;
        // The others never get past hyper, which must not look like success either.
        for byte in [0x00, 0x01, 0x1f, 0x7f] {
            let reply = servers.required.exchange(&raw(&[&[&b"idempotency-key: a"[..], &[byte], b"b"].concat()])).await;
            assert_eq!(reply.status, 400, "{byte:#x}");
        }
        assert_eq!(servers.handler.effects(), 0);
    }

    // K7
    async fn bytes_outside_ascii_in_the_key_are_refused_and_not_taken_for_no_key(world: World) {
        let servers = Servers::start(&world).await;
        for value in [
            &b"\xC3\xA5"[..], b"\xFF", b"a\xC3\xA5", b"\"\xC3\xA5\"", b"\"a\xFF\"", b"\x80", b"a\xFFb",
        ] {
            servers.assert_invalid(&raw(&[&[b"idempotency-key: ", value].concat()])).await;
        }
    }

    // K7
    async fn bytes_outside_ascii_in_other_headers_do_no_harm(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await)
            .scope(|head| head.headers.get("x-tenant").map(|tenant| Scope::new(tenant.as_bytes())));
        let server = Server::start(handler.behind(layer)).await;
        let with = |tenant: &[u8]| {
            raw(&[
                &[b"x-tenant: ", tenant].concat(),
                b"content-type: \xC3\xA5; charset=\xFF",
                b"content-encoding: \xFF",
                b"x-request-id: \xC3\xA5",
                b"authorization: \xFF",
                b"cookie: \xC3\xA5",
                b"idempotency-key: K",
            ])
        };
        let first = server.exchange(&with(b"\xC3\xA5")).await;
        assert_eq!(first.status, 201);
        assert!(server.exchange(&with(b"\xC3\xA5")).await.is_replay());
        assert_eq!(handler.effects(), 1);
        // They are compared byte by byte, not as one kind of broken text.
        let other = server.exchange(&with(b"\xFF")).await;
        assert_eq!((other.status, other.is_replay()), (201, false));
        assert_eq!(handler.effects(), 2);
    }

    async fn the_header_can_have_another_name(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await)
            .single_tenant()
            .header_name(HeaderName::from_static("webhook-id"));
        let server = Server::start(handler.behind(layer)).await;
        // The usual name means nothing here, whatever it says.
        let reply = server.exchange(&raw(&[b"idempotency-key: K"])).await;
        assert_eq!(reply.said(), (400, "idempotency_key_required".into()));
        assert!(String::from_utf8_lossy(&reply.body).contains("webhook-id"));

        let named = raw(&[b"webhook-id: K", b"idempotency-key: \"", b"idempotency-key: x"]);
        let first = server.exchange(&named).await;
        assert_eq!((first.status, first.is_replay()), (201, false));
        assert!(server.exchange(&raw(&[b"Webhook-Id: K"])).await.is_replay());
        assert_eq!(handler.effects(), 1);
    }

    async fn a_format_decides_which_keys_the_layer_takes(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let behind = |format: KeyFormat| -> Router {
            handler.behind(IdempotencyLayer::new(store.clone()).single_tenant().key_format(format))
        };
        let refused = |app: Router, key: &'static str| async move {
            let answer = send(&app, post(key, "A")).await;
            assert_eq!(answer.said(), (400, "idempotency_key_invalid".into()), "{key}");
            answer.json()["detail"].as_str().unwrap().to_owned()
        };

        let uuid = behind(KeyFormat::uuid());
        let detail = refused(uuid.clone(), "order-17").await;
        assert!(detail.contains("UUID"), "{detail}");
        let long = behind(KeyFormat::any().max_len(4));
        assert!(refused(long.clone(), "abcde").await.contains("4 bytes"));
        let quoted = behind(KeyFormat::structured());
        assert!(refused(quoted.clone(), "abcd").await.contains("quotation marks"));
        let own = behind(KeyFormat::any().check("a word in capitals", |key| {
            key.iter().all(u8::is_ascii_uppercase)
        }));
        assert!(refused(own.clone(), "abc").await.contains("must be a word in capitals"));
        assert_eq!(handler.effects(), 0);
        assert_eq!(store.total_calls(), 0);

        let id = "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11";
        assert_eq!(send(&uuid, post(id, "A")).await.status, 201);
        assert!(send(&uuid, post(&format!("\"{id}\""), "A")).await.replay);
        assert_eq!(send(&long, post("abcd", "A")).await.status, 201);
        assert!(send(&quoted, post("\"abcd\"", "A")).await.replay);
        assert_eq!(send(&own, post("ABC", "A")).await.status, 201);
        assert_eq!(handler.effects(), 3);
    }
}

#[test]
fn each_format_says_which_rule_a_value_breaks() {
    let any = KeyFormat::any();
    type Row<'a> = (KeyFormat, &'a [u8], Result<&'a [u8], InvalidKey>);
    let table: [Row<'_>; _] = [
        (any.clone(), b"abc", Ok(b"abc")),
        (any.clone(), b" \tabc\t ", Ok(b"abc")),
        (any.clone(), b"\"a b\"", Ok(b"a b")),
        (any.clone(), b"\"a\"; foo=bar; x=?1", Ok(b"a")),
        (any.clone(), b"17", Ok(b"17")),
        (any.clone(), b"?1", Ok(b"?1")),
        (any.clone(), b":YWJj:", Ok(b":YWJj:")),
        (any.clone(), b"", Err(InvalidKey::Blank)),
        (any.clone(), b"\"  \"", Err(InvalidKey::Blank)),
        (any.clone(), b"\"a", Err(InvalidKey::NotAString)),
        (any.clone(), b"\"a\",", Err(InvalidKey::NotAString)),
        (any.clone(), b"\"a\";;", Err(InvalidKey::NotAString)),
        (any.clone(), b"a,b", Err(InvalidKey::Characters)),
        (any.clone(), b"(\"a\")", Err(InvalidKey::Characters)),
        (any.clone(), &[b'a'; 256], Err(InvalidKey::TooLong(255))),
        (any.clone().max_len(3), b"abcd", Err(InvalidKey::TooLong(3))),
        (any.max_len(3), b"\"\\\\\\\\\\\\\"", Ok(b"\\\\\\")),
        (KeyFormat::structured(), b"abc", Err(InvalidKey::NotQuoted)),
        (KeyFormat::bare(), b"abc", Ok(b"abc")),
        (KeyFormat::bare(), b" abc ", Ok(b"abc")),
        (KeyFormat::bare(), b"\"abc\"", Err(InvalidKey::Characters)),
        (KeyFormat::bare(), b"", Err(InvalidKey::Blank)),
        (KeyFormat::structured(), b"", Err(InvalidKey::Blank)),
        (KeyFormat::structured(), b"\"abc\"", Ok(b"abc")),
    ];
    for (format, value, expected) in table {
        let parsed = format.parse(value);
        let parsed = parsed
            .as_ref()
            .map(|key| key.as_bytes())
            .map_err(|error| *error);
        assert_eq!(parsed, expected, "{}", String::from_utf8_lossy(value));
    }
}

#[test]
fn only_hyphenated_uuids_are_uuids() {
    let uuid = KeyFormat::uuid();
    for good in [
        "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11",
        "B3B0C1F4-8A0E-4F57-9F4A-0F5A8F9F6A11",
        "\"00000000-0000-0000-0000-000000000000\"",
    ] {
        assert!(uuid.parse(good.as_bytes()).is_ok(), "{good}");
    }
    for bad in [
        "b3b0c1f48a0e4f579f4a0f5a8f9f6a11",
        "{b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11}",
        "urn:uuid:b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11",
        "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a1",
        "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11a",
        "b3b0c1f4-8a0e-4f57-9f4a_0f5a8f9f6a11",
        "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a1g",
        "-3b0c1f4b8a0e-4f57-9f4a-0f5a8f9f6a11",
    ] {
        assert!(uuid.parse(bad.as_bytes()).is_err(), "{bad}");
    }
}

/// Decodes an RFC 9651 String without parameters by hand (§4.2.5).
fn decode_string(value: &[u8]) -> Option<Vec<u8>> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut decoded = Vec::new();
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => match bytes.next() {
                Some(escaped @ (b'"' | b'\\')) => decoded.push(*escaped),
                _ => return None,
            },
            b'"' => return None,
            0x20..=0x7e => decoded.push(*byte),
            _ => return None,
        }
    }
    Some(decoded)
}

fn usable(decoded: &[u8]) -> bool {
    (1..=255).contains(&decoded.len()) && decoded.iter().any(|byte| *byte != b' ')
}

/// Values near the border between right and wrong.
fn values() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => "[ -~]{0,8}",
        2 => Just("\"".to_owned()),
        1 => Just("\\\"".to_owned()),
        1 => Just("\\\\".to_owned()),
        1 => Just(";a=1".to_owned()),
        1 => Just(" ".to_owned()),
        1 => Just("\t".to_owned()),
        1 => Just("å".to_owned()),
        1 => "[a-z]{120,260}",
    ];
    let pieces = prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat().into_bytes());
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..300),
        pieces.clone(),
        pieces
            .clone()
            .prop_map(|inner| [b"\"", &inner[..], b"\""].concat()),
        pieces.prop_map(|inner| [b"\"", &inner[..], b"\";v"].concat()),
        "[!-~]{1,300}".prop_map(String::into_bytes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_bytes_are_read_by_the_rule_or_refused(value in values()) {
        let parsed = KeyFormat::any().parse(&value);
        let parsed = parsed.as_ref().ok().map(|key| key.as_bytes());
        let trimmed = value.trim_ascii();
        if trimmed.first() == Some(&b'"') {
            let item = sfv::Parser::new(trimmed).parse::<sfv::Item>().ok();
            let text = item.as_ref().and_then(|item| item.bare_item.as_string());
            let expected = text.map(|text| text.as_str().as_bytes()).filter(|text| usable(text));
            prop_assert_eq!(parsed, expected);
        } else {
            let fits = (1..=255).contains(&trimmed.len())
                && trimmed.iter().all(|byte| byte.is_ascii_graphic() && !b"\"',;\\".contains(byte));
            prop_assert_eq!(parsed, fits.then_some(trimmed));
        }
    }

    #[test]
    fn a_string_is_decoded_as_the_rfc_says(inner in "([ -~]|\\\\\"|\\\\\\\\){0,300}") {
        let value = format!("\"{inner}\"");
        // A quotation mark within ends the string, and what follows may be parameters.
        let expected = decode_string(value.as_bytes()).filter(|decoded| usable(decoded));
        prop_assume!(expected.is_some() || !value.contains("\";"));
        let parsed = KeyFormat::any().parse(value.as_bytes());
        prop_assert_eq!(parsed.ok().map(|key| key.as_bytes().to_vec()), expected);
    }

    #[test]
    fn every_decoded_key_can_be_spelled_as_a_string(key in "[ -~]{1,255}") {
        prop_assume!(!key.trim().is_empty());
        let spelled = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
        let parsed = KeyFormat::structured().parse(spelled.as_bytes()).unwrap();
        prop_assert_eq!(parsed.as_str(), Some(&key[..]));
    }
}

/// A scheme with a name as long as it is told.
struct Named(usize);

impl FingerprintScheme for Named {
    fn name(&self) -> Scheme {
        "n".repeat(self.0).into()
    }

    fn fingerprint(&self, _: &Parts, _: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        Ok(Fingerprint::from_bytes([0; 32]))
    }
}

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new())
}

/// What contradicts another option shows once a service is wrapped, whatever the order of setting.
fn wrapped(layer: IdempotencyLayer<MemoryStore>) -> impl Sized {
    layer.layer(Handler::new().router())
}

/// Writes one test per nonsensical setting: it panics at start-up, and the message names the option.
macro_rules! panics {
    ($($name:ident: $message:literal => $setting:expr;)*) => { $(
        #[test]
        #[should_panic(expected = $message)]
        fn $name() {
            let _ = $setting;
        }
    )* };
}

const ZERO: Duration = Duration::ZERO;
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn options_that_belong_together_may_be_set_in_any_order() {
    let day = Duration::from_secs(24 * 3600);
    wrapped(
        layer()
            .response_ttl(2 * day)
            .ttl(3 * day)
            .lease(day)
            .max_run(day),
    );
}

// K6: a bad setting is an error at start-up, never blamed on a client.
panics! {
    methods_refuses_get: "methods: GET" => layer().methods([Method::POST, Method::GET]);
    methods_refuses_head: "methods: HEAD" => layer().methods([Method::HEAD]);
    methods_refuses_options: "methods: OPTIONS" => layer().methods([Method::OPTIONS]);
    methods_refuses_trace: "methods: TRACE" => layer().methods([Method::TRACE]);
    methods_refuses_connect: "methods: CONNECT" => layer().methods([Method::CONNECT]);
    required_methods_refuses_get: "required_methods: GET" => layer().required_methods([Method::GET]);
    required_methods_refuses_connect: "required_methods: CONNECT" => layer().required_methods([Method::CONNECT]);
    a_ttl_of_zero: "ttl must be longer than zero" => layer().ttl(ZERO);
    a_response_ttl_of_zero: "response_ttl must be longer than zero" => layer().response_ttl(ZERO);
    a_response_ttl_above_ttl: "response_ttl must not be longer than ttl" => wrapped(layer().ttl(SECOND).response_ttl(2 * SECOND));
    an_abandoned_ttl_of_zero: "abandoned_ttl must be longer than zero" => layer().abandoned_ttl(ZERO);
    a_lease_of_zero: "lease must be longer than zero" => layer().lease(ZERO);
    a_lease_above_max_run: "lease must not be longer than max_run" => wrapped(layer().lease(Duration::from_secs(601)));
    a_max_run_of_zero: "max_run must be longer than zero" => layer().max_run(ZERO);
    a_max_run_below_lease: "lease must not be longer than max_run" => wrapped(layer().max_run(Duration::from_secs(29)));
    a_max_running_of_zero: "max_running must be at least 1" => layer().max_running(0);
    a_max_waiting_of_zero: "max_waiting must be at least 1" => layer().max_waiting(0);
    a_scheme_with_too_long_a_name: "fingerprint: the scheme's name must have at most 64 bytes" => layer().fingerprint(Named(65));
    an_older_scheme_with_too_long_a_name: "also_accept: the scheme's name must have at most 64 bytes" => layer().also_accept(Named(65));
    a_wait_of_zero: "in_flight: a wait must be longer than zero" => layer().in_flight(InFlight::Wait(ZERO));
    a_recovery_of_no_runs: "recovery: max_attempts must be at least 1" => layer().recovery(Recovery::Rerun { max_attempts: 0 });
    a_store_timeout_of_zero: "store_timeout must be longer than zero" => layer().store_timeout(ZERO);
    a_buffer_timeout_of_zero: "buffer_timeout must be longer than zero" => layer().buffer_timeout(ZERO);
    a_reuse_status_of_success: "reuse_status must be a 4xx status" => layer().reuse_status(StatusCode::OK);
    a_reuse_status_of_server_error: "reuse_status must be a 4xx status" => layer().reuse_status(StatusCode::INTERNAL_SERVER_ERROR);
    a_documentation_url_that_is_none: "documentation_url must be a URL" => layer().documentation_url("not a url");
    an_empty_documentation_url: "documentation_url must be a URL" => layer().documentation_url("");
    a_documentation_url_that_names_nothing: "documentation_url must be a URL" => layer().documentation_url("*");
    a_documentation_url_with_a_fragment: "without a fragment" => layer().documentation_url("https://docs.example/a#b");
    a_documentation_url_with_a_line_break: "documentation_url must be a URL" => layer().documentation_url("https://docs.example/\r\nx: y");
    a_key_length_of_zero: "key_format: max_len must be from 1 to 255" => KeyFormat::any().max_len(0);
    a_key_length_of_256: "key_format: max_len must be from 1 to 255" => KeyFormat::any().max_len(256);
    no_records_in_memory: "max_records must be at least 1" => MemoryStore::options().max_records(0);
    no_bytes_in_memory: "max_bytes must be at least 1" => MemoryStore::options().max_bytes(0);
    no_records_in_sqlite: "max_records must be at least 1" => SqliteStore::options("unused.db").max_records(0);
    a_busy_timeout_of_zero: "busy_timeout must be more than zero" => SqliteStore::options("unused.db").busy_timeout(ZERO);
    a_busy_timeout_of_two_days: "busy_timeout must be more than zero and at most a day" => SqliteStore::options("unused.db").busy_timeout(Duration::from_secs(2 * 86_400));
}

#[tokio::test]
async fn the_largest_and_smallest_settings_that_make_sense_work() {
    let nanosecond = Duration::from_nanos(1);
    for layer in [
        layer()
            .ttl(Duration::MAX)
            .response_ttl(Duration::MAX)
            .abandoned_ttl(Duration::MAX),
        layer()
            .max_run(Duration::MAX)
            .lease(Duration::MAX)
            .store_timeout(Duration::MAX)
            .buffer_timeout(Duration::MAX),
        layer()
            .max_running(usize::MAX)
            .max_waiting(usize::MAX)
            .in_flight(InFlight::Wait(Duration::MAX)),
        layer()
            .ttl(nanosecond)
            .response_ttl(nanosecond)
            .abandoned_ttl(nanosecond),
        layer()
            .fingerprint(Named(64))
            .also_accept(Named(0))
            .key_format(KeyFormat::any().max_len(1)),
        layer()
            .reuse_status(StatusCode::BAD_REQUEST)
            .documentation_url("/docs/idempotency"),
    ] {
        let app = Handler::new().behind(layer.single_tenant());
        let answer = send(&app, post("k", "A")).await;
        assert_eq!(answer.status, 201);
    }
}

#[tokio::test]
async fn a_run_without_any_time_limit_is_renewed_and_waited_for() {
    let handler = Handler::new();
    handler.close_gate();
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let app = handler.behind(
        IdempotencyLayer::new(store.clone())
            .single_tenant()
            .max_run(Duration::MAX)
            .lease(Duration::MAX)
            .in_flight(InFlight::Wait(Duration::MAX)),
    );
    // On this one thread the run begins before the heartbeat looks for the first time.
    let runs: Vec<_> = (0..2)
        .map(|_| {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post("k", "A")).await })
        })
        .collect();
    handler.reached(1).await;
    eventually("the heartbeat", || store.calls(Operation::Renew) > 0).await;
    store.called(Operation::Claim, 3).await;
    handler.open_gate();
    let mut answers = Vec::new();
    for run in runs {
        answers.push(run.await.unwrap());
    }
    answers[1].assert_replays(&answers[0]);
    assert_eq!(handler.effects(), 1);
}

#[tokio::test]
async fn a_key_among_other_headers_is_looked_up_whatever_the_letter_case_of_its_name() {
    let handler = Handler::new();
    let app = handler.behind(layer().single_tenant());
    let request = || {
        Request::post("/charges")
            .header("IDEMPOTENCY-KEY", "K")
            .body(Body::from("A"))
            .unwrap()
    };
    assert_eq!(send(&app, request()).await.status, 201);
    assert!(send(&app, request()).await.replay);
    assert_eq!(handler.effects(), 1);
}
