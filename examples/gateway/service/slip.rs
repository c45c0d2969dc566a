//! A slip as evidence: an image and a note, however they were packed.

use std::convert::Infallible;

use axum::http::{HeaderMap, header};
use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use futures_util::{FutureExt, stream};
use multer::Multipart;
use serde::Deserialize;
use tower_idempotency::{Fingerprint, FingerprintScheme, UndecodableBody, fingerprint_fn};

/// How many bytes an image may have.
pub const MAX_IMAGE: usize = 4 * 1024 * 1024;

/// How evidence may come, beside `multipart/form-data`.
pub const CONTENT_TYPES: [&str; 4] = ["image/jpeg", "image/png", "image/webp", "application/json"];

const OTHER_TYPE: UndecodableBody = UndecodableBody(
    "its Content-Type is none of image/jpeg, image/png, image/webp, application/json and multipart/form-data",
);
const NO_JSON: UndecodableBody =
    UndecodableBody("it is not a JSON object of image_base64 and, where there is one, note");
const NO_BASE64: UndecodableBody = UndecodableBody("image_base64 is not base64");
const NO_FORM: UndecodableBody = UndecodableBody(
    "the form is cut short or malformed, or its boundary is not the one its Content-Type names",
);
const OTHER_PARTS: UndecodableBody =
    UndecodableBody("the form has other parts than one image and at most one note");
const NO_TEXT: UndecodableBody = UndecodableBody("the note is not UTF-8");
const NO_IMAGE: UndecodableBody = UndecodableBody("the image is no JPEG, PNG or WebP");

pub struct Slip {
    /// An empty one is none.
    pub note: Option<String>,
    pub image: Bytes,
    /// What the image is, whatever its sender calls it.
    pub content_type: &'static str,
}

/// The scheme of evidence: path, note and the image's bytes. So the same slip is the same request, as JSON with its
/// members in any order and its base64 in any spelling, as a form with any boundary, and as a bare image.
///
/// What cannot be read is refused and never taken for an empty slip: else two broken ones would be the same.
pub fn fingerprint() -> impl FingerprintScheme {
    fingerprint_fn("slip-v1", |head, body| {
        let slip = Slip::read(&head.headers, body)?;
        let note = slip.note.as_deref().unwrap_or_default();
        let parts = [head.uri.path().as_bytes(), note.as_bytes(), &slip.image];
        Ok(Fingerprint::of(parts))
    })
}

impl Slip {
    pub fn read(headers: &HeaderMap, body: &Bytes) -> Result<Self, UndecodableBody> {
        let media_type = headers.get(header::CONTENT_TYPE);
        let media_type = media_type.and_then(|value| value.to_str().ok());
        let media_type = media_type.ok_or(OTHER_TYPE)?;
        let essence = media_type.split(';').next().unwrap_or_default().trim();
        let (note, image) = match &*essence.to_ascii_lowercase() {
            "application/json" => json(body)?,
            "multipart/form-data" => form(media_type, body)?,
            "image/jpeg" | "image/png" | "image/webp" => (None, body.clone()),
            _ => return Err(OTHER_TYPE),
        };
        Ok(Self {
            note: note.filter(|note| !note.is_empty()),
            content_type: kind(&image).ok_or(NO_IMAGE)?,
            image,
        })
    }
}

type Evidence = (Option<String>, Bytes);

/// An unknown member is refused, since it would count for nothing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    note: Option<String>,
    image_base64: String,
}

fn json(body: &[u8]) -> Result<Evidence, UndecodableBody> {
    let slip: Json = serde_json::from_slice(body).map_err(|_| NO_JSON)?;
    let image = decode(&slip.image_base64).ok_or(NO_BASE64)?;
    Ok((slip.note, image.into()))
}

/// Both alphabets of RFC 4648, padded or not, in lines or not.
fn decode(base64: &str) -> Option<Vec<u8>> {
    const PADDED_OR_NOT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let characters = base64.bytes().filter(|byte| !byte.is_ascii_whitespace());
    let standard: Vec<u8> = characters
        .map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            other => other,
        })
        .collect();
    PADDED_OR_NOT.decode(standard).ok()
}

fn form(media_type: &str, body: &Bytes) -> Result<Evidence, UndecodableBody> {
    let boundary = multer::parse_boundary(media_type).map_err(|_| NO_FORM)?;
    let all_of_it = stream::iter([Ok::<_, Infallible>(body.clone())]);
    let parts = parts(Multipart::new(all_of_it, boundary));
    // All bytes are at hand, so nothing is ever waited for.
    parts.now_or_never().unwrap_or(Err(NO_FORM))
}

async fn parts(mut form: Multipart<'_>) -> Result<Evidence, UndecodableBody> {
    let (mut note, mut image) = (None, None);
    while let Some(part) = form.next_field().await.map_err(|_| NO_FORM)? {
        let name = part.name().unwrap_or_default().to_owned();
        let content = part.bytes().await.map_err(|_| NO_FORM)?;
        match &*name {
            "note" if note.is_none() => {
                let text = String::from_utf8(content.into()).map_err(|_| NO_TEXT)?;
                note = Some(text);
            }
            "image" if image.is_none() => image = Some(content),
            _ => return Err(OTHER_PARTS),
        }
    }
    Ok((note, image.ok_or(OTHER_PARTS)?))
}

/// By the first bytes.
fn kind(image: &[u8]) -> Option<&'static str> {
    match image {
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [
            b'R',
            b'I',
            b'F',
            b'F',
            _,
            _,
            _,
            _,
            b'W',
            b'E',
            b'B',
            b'P',
            ..,
        ] => Some("image/webp"),
        _ => None,
    }
}
