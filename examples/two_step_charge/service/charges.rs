//! The handlers, and the order of the steps.

use axum::{
    Json,
    extract::{Path, State, rejection::JsonRejection},
    http::{HeaderMap, StatusCode, header::LOCATION},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tower_idempotency::Idempotency;

use super::{
    Service, Step, client,
    ledger::{self, Charge, Order, Status},
    refused::Refused,
};

/// The step whose downstream key the provider gets. Another name is another key, and so another charge.
pub const CHARGE: &str = "charge";
/// The checkpoint with what the provider said.
pub const VERDICT: &str = "verdict";

/// Charges. However often this runs for one key, and wherever a run is cut off, the provider charges once.
pub async fn create(
    State(service): State<Service>,
    idempotency: Idempotency,
    order: Result<Json<Order>, JsonRejection>,
) -> Result<Response, Refused> {
    let Json(order) = order.map_err(Refused::Malformed)?;
    let order = order.checked()?;
    let (client, key) = (idempotency.scope().as_bytes(), idempotency.key().as_bytes());
    let charge = ledger::reserve(&service.ledger, client, key, &order).await?;
    (service.pause)(Step::Reserved).await;
    let charge = finish(&service, &idempotency, charge).await?;
    Ok(answer(&charge))
}

/// Takes a charge from wherever an earlier run has left it to its end.
async fn finish(
    service: &Service,
    idempotency: &Idempotency,
    charge: Charge,
) -> Result<Charge, Refused> {
    if charge.status != Status::Reserved {
        return Ok(charge);
    }
    let verdict = match idempotency.checkpointed(VERDICT).await? {
        Some(noted) => noted,
        None => {
            let key = idempotency.downstream_key(CHARGE)?;
            let verdict = service.gateway.charge(&key, &charge).await;
            let verdict = verdict.map_err(|unclear| Refused::Unclear(charge.id, unclear))?;
            (service.pause)(Step::Answered).await;
            // From here on nobody has to ask the provider again.
            idempotency.checkpoint(VERDICT, &verdict).await?;
            verdict
        }
    };
    (service.pause)(Step::Noted).await;
    let charge = ledger::settle(&service.ledger, charge.id, &verdict).await?;
    (service.pause)(Step::Settled).await;
    Ok(charge)
}

/// The present state. A replay is a picture of the past; whoever wants to know what is so now asks here.
pub async fn show(
    State(service): State<Service>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, Refused> {
    let client = client(&headers).ok_or(Refused::Nobody)?;
    let id = id.strip_prefix("ch_").and_then(|id| id.parse().ok());
    let id = id.ok_or(Refused::Missing)?;
    let charge = ledger::find(&service.ledger, id).await?;
    // Another client's charge is not even there.
    let charge = charge.filter(|charge| charge.client == client.as_bytes());
    Ok(Json(view(&charge.ok_or(Refused::Missing)?)))
}

pub async fn budget(
    State(service): State<Service>,
    Path(currency): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, Refused> {
    let client = client(&headers).ok_or(Refused::Nobody)?;
    let budget = ledger::budget(&service.ledger, client.as_bytes(), &currency).await?;
    let (available, reserved, spent) = budget.ok_or(Refused::Missing)?;
    Ok(Json(json!({
        "available_minor": available,
        "reserved_minor": reserved,
        "spent_minor": spent,
    })))
}

/// What every run answers, and the resolver in the place of one that was cut off. 402 is the provider's last word, and the layer keeps it as it keeps a 201: what was declined under this
/// key stays declined.
pub fn answer(charge: &Charge) -> Response {
    let status = match charge.status {
        Status::Declined => StatusCode::PAYMENT_REQUIRED,
        Status::Reserved | Status::Charged => StatusCode::CREATED,
    };
    let location = [(LOCATION, format!("/charges/ch_{}", charge.id))];
    (status, location, Json(view(charge))).into_response()
}

fn view(charge: &Charge) -> Value {
    json!({
        "charge_id": format!("ch_{}", charge.id),
        "status": charge.status.as_str(),
        "amount_minor": charge.amount_minor,
        "currency": charge.currency,
        "provider_charge_id": charge.provider_charge_id,
    })
}
