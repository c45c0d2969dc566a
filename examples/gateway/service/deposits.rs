//! Orders that wait for a customer's money.

use std::{net::IpAddr, time::Duration};

use axum::{
    Extension, Json,
    extract::{
        FromRequest, FromRequestParts, Path, Query, Request, State, rejection::QueryRejection,
    },
    http::{StatusCode, header::LOCATION, request::Parts},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tower_idempotency::Idempotency;

use super::{
    Service, Tx,
    ledger::{self, Action, Deposit},
    merchants::Merchant,
    refused::Refused,
    sandbox::Delay,
    slip::{CONTENT_TYPES, MAX_IMAGE},
    token::UploadToken,
};

/// How long a customer has to pay.
const TO_PAY: Duration = Duration::from_secs(20 * 60);
/// How much longer a slip may be uploaded.
const TO_PROVE: Duration = Duration::from_secs(24 * 3600);

/// From here on money has to be found first, and the order is split.
pub const LARGE: i64 = 10_000_000;
const LEG: i64 = 5_000_000;
/// How long finding it takes here.
const FINDING: Duration = Duration::from_secs(2);

const MOST: i64 = 100_000_000;
const CURRENCIES: [&str; 2] = ["THB", "USD"];

#[derive(Deserialize)]
pub struct Order {
    merchant_reference: String,
    amount_minor: i64,
    currency: String,
    client: Client,
}

#[derive(Deserialize)]
struct Client {
    ip: IpAddr,
}

impl Order {
    fn checked(self) -> Result<Self, Refused> {
        let reference = self.merchant_reference.trim();
        if reference.is_empty() || reference.len() > 100 {
            return Err(Refused::member("merchant_reference", "1 to 100 bytes"));
        }
        if !(1..=MOST).contains(&self.amount_minor) {
            return Err(Refused::member("amount_minor", "from 1 to 100000000"));
        }
        if !CURRENCIES.contains(&&*self.currency) {
            return Err(Refused::member("currency", "THB or USD"));
        }
        Ok(self)
    }
}

impl<S: Send + Sync> FromRequest<S> for Order {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let Json(order) = Json::<Self>::from_request(request, state).await?;
        order.checked()
    }
}

/// The order that a path names.
pub struct DepositId(pub String);

impl<S: Send + Sync> FromRequestParts<S> for DepositId {
    type Rejection = Refused;

    /// What is not UTF-8 is no order's id, and is answered like any other that is none.
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        let id = Path::from_request_parts(parts, state).await;
        let Path(id) = id.map_err(|_| Refused::missing())?;
        Ok(Self(id))
    }
}

/// Makes an order. 201, or 202 where the money has to be found first: the replay of a 202 is a picture of the
/// past, and how the order stands now is asked with GET.
pub async fn create(
    State(service): State<Service>,
    Extension(merchant): Extension<Merchant>,
    idempotency: Idempotency,
    delay: Delay,
    mut tx: Tx,
    order: Order,
) -> Result<Response, Refused> {
    let token = UploadToken::random();
    let now = now();
    let deposit = Deposit {
        id: format!("dep_{:016x}", rand::random::<u64>()),
        merchant_reference: order.merchant_reference,
        amount_minor: order.amount_minor,
        currency: order.currency,
        client_ip: order.client.ip.to_string(),
        created_at: now,
        upload_token: token.hash().to_vec(),
    };
    let action = Action {
        merchant: &merchant,
        key: idempotency.key().as_bytes(),
        at: now,
        ttl: service.ttl,
    };
    ledger::create(&mut tx, action, &deposit).await?;
    delay.take().await;

    let status = match deposit.status(now) {
        AWAITING_LIQUIDITY => StatusCode::ACCEPTED,
        _ => StatusCode::CREATED,
    };
    let location = [(LOCATION, format!("/v1/pay/deposits/{}", deposit.id))];
    let view = deposit.view(now, Some(token.reveal()));
    Ok((status, location, Json(view)).into_response())
}

pub async fn show(
    State(service): State<Service>,
    Extension(merchant): Extension<Merchant>,
    DepositId(id): DepositId,
) -> Result<Response, Refused> {
    let deposit = ledger::find(&service.ledger, &merchant, &id).await?;
    let deposit = deposit.ok_or_else(Refused::missing)?;
    Ok(Json(deposit.view(now(), None)).into_response())
}

#[derive(Deserialize)]
pub struct Search {
    merchant_reference: String,
}

/// For a merchant who does not know what became of a request: by its own reference.
pub async fn list(
    State(service): State<Service>,
    Extension(merchant): Extension<Merchant>,
    search: Result<Query<Search>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(search) = search.map_err(|_| Refused::reference_needed())?;
    let reference = search.merchant_reference;
    let found = ledger::find_by_reference(&service.ledger, &merchant, &reference).await?;
    if found.is_empty() {
        return Err(Refused::missing());
    }
    let now = now();
    let list = List {
        object: "list",
        data: found.iter().map(|found| found.view(now, None)).collect(),
    };
    Ok(Json(list).into_response())
}

/// In whole milliseconds, as it is stored.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}

/// As in RFC 3339, always with milliseconds.
pub fn rfc3339(at: Timestamp) -> String {
    format!("{at:.3}")
}

const AWAITING_LIQUIDITY: &str = "awaiting_liquidity";

/// An order as its merchant sees it.
#[derive(Serialize)]
struct View<'a> {
    id: &'a str,
    object: &'static str,
    version: u32,
    status: &'static str,
    is_terminal: bool,
    merchant_reference: &'a str,
    amount_minor: i64,
    currency: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    legs: Option<Vec<Leg>>,
    created_at: String,
    expires_at: String,
    checkout_url: String,
    slip_upload: SlipUpload<'a>,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<View<'a>>,
}

#[derive(Serialize)]
struct Leg {
    sequence: usize,
    amount_minor: i64,
}

#[derive(Serialize)]
struct SlipUpload<'a> {
    /// Shown once, to whoever makes the order, and to the retries of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a str>,
    expires_at: String,
    upload_url: String,
    max_bytes: usize,
    content_types: [&'static str; 4],
}

impl Deposit {
    /// When its upload token ends.
    pub fn upload_expires_at(&self) -> Timestamp {
        self.created_at + TO_PAY + TO_PROVE
    }

    fn status(&self, at: Timestamp) -> &'static str {
        match self.amount_minor >= LARGE && at < self.created_at + FINDING {
            true => AWAITING_LIQUIDITY,
            false => "awaiting_payment",
        }
    }

    /// The parts in which a large order is paid, once they are found.
    fn legs(&self, at: Timestamp) -> Option<Vec<Leg>> {
        if self.amount_minor < LARGE {
            return None;
        }
        let found = match self.status(at) {
            AWAITING_LIQUIDITY => 0,
            _ => self.amount_minor,
        };
        let starts = (0..found).step_by(LEG as usize).zip(1..);
        let leg = |(start, sequence)| Leg {
            sequence,
            amount_minor: LEG.min(found - start),
        };
        Some(starts.map(leg).collect())
    }

    fn view<'a>(&'a self, at: Timestamp, token: Option<&'a str>) -> View<'a> {
        View {
            id: &self.id,
            object: "deposit_order",
            version: 2,
            status: self.status(at),
            is_terminal: false,
            merchant_reference: &self.merchant_reference,
            amount_minor: self.amount_minor,
            currency: &self.currency,
            legs: self.legs(at),
            created_at: rfc3339(self.created_at),
            expires_at: rfc3339(self.created_at + TO_PAY),
            checkout_url: format!("https://pay.example/checkout/{}", self.id),
            slip_upload: SlipUpload {
                token,
                expires_at: rfc3339(self.upload_expires_at()),
                upload_url: format!("/v1/pay/deposits/{}/slip", self.id),
                max_bytes: MAX_IMAGE,
                content_types: CONTENT_TYPES,
            },
        }
    }
}
