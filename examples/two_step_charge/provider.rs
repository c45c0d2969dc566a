//! The other party: a payment provider that charges once per key, and tells by key what it has charged. It
//! knows nothing of the service and has a file of its own.

use std::path::Path;

use axum::{
    Json, Router,
    extract::{Path as InPath, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::{
    FromRow, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

/// It declines what is more.
pub const MOST_MINOR: i64 = 500_000;

pub fn app(charges: SqlitePool) -> Router {
    Router::new()
        .route("/charges", post(charge).get(count))
        .route("/charges/by-key/{key}", get(look_up))
        .with_state(charges)
}

pub async fn open(file: &Path) -> Result<SqlitePool, sqlx::Error> {
    let options = SqliteConnectOptions::new().filename(file);
    let options = options.create_if_missing(true);
    let options = options.journal_mode(SqliteJournalMode::Wal);
    let charges = SqlitePool::connect_with(options).await?;
    let table = "CREATE TABLE IF NOT EXISTS charges (
        id INTEGER PRIMARY KEY,
        idempotency_key TEXT NOT NULL UNIQUE,
        amount_minor INTEGER NOT NULL,
        currency TEXT NOT NULL,
        status TEXT NOT NULL
    ) STRICT";
    sqlx::query(table).execute(&charges).await?;
    Ok(charges)
}

#[derive(Deserialize)]
struct Order {
    amount_minor: i64,
    currency: String,
}

async fn charge(
    State(charges): State<SqlitePool>,
    headers: HeaderMap,
    Json(order): Json<Order>,
) -> Result<Response, Broken> {
    let key = headers.get("idempotency-key");
    let Some(key) = key.and_then(|key| key.to_str().ok()) else {
        return Ok(StatusCode::BAD_REQUEST.into_response());
    };
    let declined = order.amount_minor > MOST_MINOR;
    let made = sqlx::query(
        "INSERT INTO charges (idempotency_key, amount_minor, currency, status)
         VALUES (?, ?, ?, ?) ON CONFLICT (idempotency_key) DO NOTHING",
    );
    let made = made
        .bind(key)
        .bind(order.amount_minor)
        .bind(&order.currency);
    let made = made.bind(if declined { "declined" } else { "charged" });
    made.execute(&charges).await?;

    let found = find(&charges, key).await?.ok_or(sqlx::Error::RowNotFound)?;
    if (found.amount_minor, &found.currency) != (order.amount_minor, &order.currency) {
        return Ok(StatusCode::CONFLICT.into_response());
    }
    let code = match &*found.status {
        "charged" => StatusCode::CREATED,
        _ => StatusCode::PAYMENT_REQUIRED,
    };
    Ok((code, found.shown()).into_response())
}

/// What became of the charge with this key. That there is none is said in words as well, since a proxy or a
/// wrong address answers 404, too.
async fn look_up(
    State(charges): State<SqlitePool>,
    InPath(key): InPath<String>,
) -> Result<Response, Broken> {
    Ok(match find(&charges, &key).await? {
        Some(found) => found.shown().into_response(),
        None => {
            let body = json!({ "error": "no_such_charge" });
            (StatusCode::NOT_FOUND, Json(body)).into_response()
        }
    })
}

#[derive(FromRow)]
struct Charge {
    id: i64,
    amount_minor: i64,
    currency: String,
    status: String,
}

impl Charge {
    fn shown(&self) -> Json<Value> {
        Json(json!({ "id": format!("pc_{}", self.id), "status": self.status }))
    }
}

async fn find(charges: &SqlitePool, key: &str) -> Result<Option<Charge>, sqlx::Error> {
    let found = sqlx::query_as(
        "SELECT id, amount_minor, currency, status FROM charges WHERE idempotency_key = ?",
    );
    found.bind(key).fetch_optional(charges).await
}

/// How many charges there are, and what they come to. Declined ones do not count.
async fn count(State(charges): State<SqlitePool>) -> Result<Json<Value>, Broken> {
    let counted = sqlx::query_as(
        "SELECT count(*), coalesce(sum(amount_minor), 0) FROM charges WHERE status = 'charged'",
    );
    let (count, amount): (i64, i64) = counted.fetch_one(&charges).await?;
    Ok(Json(json!({ "count": count, "amount_minor": amount })))
}

struct Broken(sqlx::Error);

impl From<sqlx::Error> for Broken {
    fn from(error: sqlx::Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Broken {
    fn into_response(self) -> Response {
        tracing::error!(error = %self.0, "the provider's charges are out of reach");
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
