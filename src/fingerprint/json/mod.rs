//! What a JSON document says, whatever way it is written.

mod buffer;
mod document;
mod escapes;
mod ignored;
mod member;
mod objects;
mod order;
mod reader;
mod scan;
mod text;

use std::{collections::BTreeSet, fmt::Write};

use bytes::Bytes;
use http::{HeaderMap, header, request::Parts};
use sha2::{Digest, Sha256};

pub(crate) use self::member::{Named, Pointer};
use self::{document::Canonical, ignored::Ignored, reader::Unread};
use super::{FingerprintScheme, UndecodableBody, essence, head_of};
use crate::record::{Fingerprint, Scheme};

/// Compares JSON bodies by what they say: the order of members, white space and the spelling of
/// strings do not count. Everything else does.
///
/// For clients that build the body anew for each attempt, from a map whose order changes, or with
/// another serialiser after an update. Under [`ExactRequest`](crate::ExactRequest) their honest retries
/// are refused.
///
/// | | |
/// | --- | --- |
/// | order of members, at every depth | does not count |
/// | white space between tokens | does not count |
/// | escapes, in names too: `"\u00e9"`, `"é"` | do not count: the characters do |
/// | order of array elements | counts |
/// | numbers | count as they are written: `1`, `1.0` and `1e0` are three, `-0` is not `0`, and 9007199254740992 is not 9007199254740993. Nothing passes through a floating point number |
/// | `1` and `"1"`, `null` and an absent member, `[]` and `{}` | differ |
/// | text that looks alike but is made of other characters, such as `é` and `e` with an accent after it | differs |
/// | method, path, query, media type, Content-Encoding | count, as in [`ExactRequest`](crate::ExactRequest) |
///
/// A body is read as JSON (RFC 8259) where its one Content-Type is `application/json` or ends in
/// `+json`, or where there is none, and where there is no Content-Encoding but `identity`. Any other
/// body counts byte for byte: another media type, what is not JSON (broken, empty, with a byte order
/// mark, not UTF-8), and what has 4 GiB or more. So two different broken bodies are two requests,
/// and neither of them is that of a body that can be read.
///
/// # Errors
///
/// Some documents are JSON and still say nothing that could be compared. They are refused with 400
/// `idempotency_body_invalid`, before anything is claimed or run:
///
/// - An object with two members of one name, after escapes: of `{"amount":1,"amount":9}` one reader
///   takes the first and another the last.
/// - Arrays and objects that stand in each other more than 128 deep.
///
/// Also inside members that are left out. Of a body that has such a fault and is not JSON further on,
/// what comes first is what counts: the end of the object with two members of one name, the
/// beginning of what is too deep, or the place where it stops being JSON.
///
/// # Leaving members out
///
/// What a client writes anew with each attempt, such as a timestamp, is named by
/// [`ignoring`](Self::ignoring). The list is part of the scheme's [name](FingerprintScheme::name).
///
/// # The digest
///
/// SHA-256 over the parts of the head as in [`ExactRequest`](crate::ExactRequest), then `json` and the
/// canonical text, or `raw` and the body's bytes, each preceded by its length (eight bytes,
/// big-endian). The canonical text has no white space, strings as RFC 8785 §3.2.2.2 spells them (and
/// lone surrogates as `\udead`, in lower case), members in the order of their names' bytes in that
/// spelling, and numbers as they came. Two documents have one text only if they are equal as said
/// above.
///
/// It takes a few times as long as [`ExactRequest`](crate::ExactRequest), whatever the names and the
/// nesting are: `cargo bench --bench fingerprint` has figures. Meanwhile it takes memory, as a rule
/// once or twice the size of the body, and some ten times that of an object with very many very short
/// members.
///
/// # Example
///
/// ```
/// use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{CanonicalJson, IdempotencyLayer, IdempotentResponse, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let scheme = CanonicalJson::new().ignoring(["/requested_at"]);
/// let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant().fingerprint(scheme);
/// let app: Router = Router::new()
///     .route("/payments", post(|| async { StatusCode::CREATED }))
///     .route_layer(layer);
/// let pay = |body: &'static str| {
///     let request = Request::post("/payments")
///         .header("content-type", "application/json")
///         .header("idempotency-key", "order-17")
///         .body(Body::from(body));
///     app.clone().oneshot(request.unwrap())
/// };
///
/// let first = pay(r#"{"amount":250,"to":"Zoë","requested_at":"12:00:00"}"#).await.unwrap();
/// assert_eq!((first.status(), first.is_replay()), (StatusCode::CREATED, false));
/// // Rebuilt by the retry: the same payment.
/// let retry = pay(r#"{ "requested_at": "12:00:09", "to": "Zo\u00eb", "amount": 250 }"#).await.unwrap();
/// assert!(retry.is_replay());
/// // Another amount, and so is 250.0: whether they are the same money is not for a digest to say.
/// for other in [r#"{"amount":251,"to":"Zoë"}"#, r#"{"amount":250.0,"to":"Zoë"}"#] {
///     assert_eq!(pay(other).await.unwrap().status(), StatusCode::CONFLICT);
/// }
/// // Whose amount is this?
/// let unclear = pay(r#"{"amount":1,"amount":9}"#).await.unwrap();
/// assert_eq!(unclear.status(), StatusCode::BAD_REQUEST);
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CanonicalJson {
    name: Scheme,
    pointers: BTreeSet<String>,
    ignored: Ignored,
}

impl CanonicalJson {
    /// The scheme under which every member counts.
    pub fn new() -> Self {
        Self {
            name: Scheme::Borrowed("json-v1"),
            pointers: BTreeSet::new(),
            ignored: Ignored::default(),
        }
    }

    /// Leaves out the members that these JSON Pointers (RFC 6901) name, with all that is in them.
    /// Called again, it adds to the list. Default: none.
    ///
    /// A `/` in a name is written `~1`, a `~` is written `~0`. An array is walked through by the
    /// numbers of its elements, each by itself: `/items/0/seen_at`. Only members are left out; a
    /// pointer that names an element of an array, or nothing that is there, leaves nothing out. A
    /// document with such a member and one without it are equal.
    ///
    /// Leave out only what the handler does not act on: a retry that differs in nothing else gets
    /// the answer to the first attempt.
    ///
    /// The list makes the scheme's name, so that records made under another list are known as such.
    /// When it changes, keep the earlier one registered with
    /// [`also_accept`](crate::IdempotencyLayer::also_accept) for as long as its records live, or the
    /// honest retries of a deploy are refused:
    ///
    /// ```
    /// # use tower_idempotency::{CanonicalJson, IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .fingerprint(CanonicalJson::new().ignoring(["/requested_at", "/client/ip"]))
    ///     .also_accept(CanonicalJson::new().ignoring(["/requested_at"]));
    /// ```
    ///
    /// # Panics
    ///
    /// When a pointer does not begin with a slash, or has a `~` that neither `0` nor `1` follows. The
    /// empty pointer names the whole document; to compare nothing of it, there is
    /// [`KeyOnly`](crate::KeyOnly).
    #[must_use]
    pub fn ignoring<P: AsRef<str>>(mut self, pointers: impl IntoIterator<Item = P>) -> Self {
        for pointer in pointers {
            let pointer = pointer.as_ref();
            self.ignored.add(pointer);
            self.pointers.insert(pointer.to_owned());
        }
        if !self.pointers.is_empty() {
            self.name = Scheme::Owned(name_with(&self.pointers));
        }
        self
    }

    /// The canonical text of a body that is JSON.
    fn canonical<'b>(&self, body: &'b [u8]) -> Result<Canonical<'b>, Unread> {
        // Positions have 32 bits.
        if u32::try_from(body.len()).is_err() {
            return Err(Unread::NotJson);
        }
        let ignored = (!self.pointers.is_empty()).then_some(&self.ignored);
        Ok(reader::read(body, ignored)?.canonical())
    }
}

impl Default for CanonicalJson {
    fn default() -> Self {
        Self::new()
    }
}

/// The name of the scheme that leaves these members out.
fn name_with(pointers: &BTreeSet<String>) -> String {
    let mut name = String::from("json-v1-");
    for byte in &Fingerprint::of(pointers).as_bytes()[..8] {
        // Writing to a string cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    name
}

impl FingerprintScheme for CanonicalJson {
    /// `json-v1`. With members left out `json-v1-` and 16 hexadecimal digits, the first of SHA-256
    /// over the sorted list of pointers, each preceded by its length.
    fn name(&self) -> Scheme {
        self.name.clone()
    }

    fn fingerprint(&self, head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let canonical = match is_json(&head.headers) {
            true => self.canonical(body),
            false => Err(Unread::NotJson),
        };
        let (how, text) = match &canonical {
            Ok(text) => (&b"json"[..], text.as_bytes()),
            Err(Unread::NotJson) => (&b"raw"[..], &body[..]),
            Err(Unread::DuplicateMember) => return Err(UndecodableBody(DUPLICATE)),
            Err(Unread::TooDeep) => return Err(UndecodableBody(TOO_DEEP)),
        };
        let mut framed = head_of(head);
        framed.part(how);
        framed.length(text.len());
        let digest = Sha256::new().chain_update(framed.0).chain_update(text);
        Ok(Fingerprint::from_bytes(digest.finalize().into()))
    }
}

const DUPLICATE: &str = "an object has two members of one name; send each name once";
const TOO_DEEP: &str = "arrays and objects stand in each other more than 128 deep; nest them less";

/// Whether the body is to be read as JSON.
fn is_json(headers: &HeaderMap) -> bool {
    let mut types = headers.get_all(header::CONTENT_TYPE).iter();
    let is_json_type = match (types.next(), types.next()) {
        (None, _) => true,
        (Some(one), None) => is_json_type(essence(one.as_bytes())),
        (Some(_), Some(_)) => false,
    };
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let identity = |coding: &[u8]| coding.trim_ascii().eq_ignore_ascii_case(b"identity");
    is_json_type && codings.all(|coding| identity(coding.as_bytes()))
}

/// `application/json`, or any type with the suffix `+json` (RFC 6839 §3.1).
fn is_json_type(essence: &[u8]) -> bool {
    let suffix = essence.last_chunk().is_some_and(|suffix: &[u8; 5]| {
        suffix.eq_ignore_ascii_case(b"+json") && essence.contains(&b'/')
    });
    suffix || essence.eq_ignore_ascii_case(b"application/json")
}
