//! The service without its process: routes, layer and tables.
//!
//! A key protects an *action*: sent again, it is not done again. It does not protect a *balance*: two
//! actions under two keys may still meet in one row. For that each route has the cure that fits its
//! rule, from the cheapest to the dearest:
//!
//! | rule | cure | where |
//! | --- | --- | --- |
//! | over one row, and known before it is read | conditional `UPDATE` | [`wallets`] |
//! | "at most one of these" | unique index | [`payouts`] |
//! | nobody changed what a person looked at | version in the `UPDATE` | [`settings`] |
//! | over few rows that are known | `SELECT … FOR UPDATE` in one order | [`transfers`] |
//! | over many rows, or rows that may not exist yet | total row, lock on the parent, or `SERIALIZABLE` | [`customers`] |

use axum::{
    Router,
    http::{Method, request},
    routing::{get, post, put},
};
use sqlx::{PgPool, Postgres};
use tower_idempotency::{IdempotencyLayer, Isolation, PostgresStore, Scope, TxOptions};

pub mod customers;
pub mod drill;
pub mod given;
mod ledger;
mod payouts;
pub mod refused;
mod settings;
mod transfers;
pub mod wallets;

/// A handler's transaction.
pub type Tx = tower_idempotency::Tx<Postgres>;

/// The service, as it is to be served.
pub fn app(pool: PgPool, layer: IdempotencyLayer<PostgresStore>) -> Router {
    // `route_layer`, so that an unknown path is a 404 and not a question of keys.
    routes().route_layer(layer).with_state(pool)
}

/// All routes. Those that only read use the pool: one statement needs no transaction.
pub fn routes() -> Router<PgPool> {
    Router::new()
        .route("/wallets/{id}", get(wallets::show))
        .route("/wallets/{id}/withdrawals", post(wallets::withdraw))
        .route("/wallets/{id}/deposits", post(wallets::deposit))
        .route("/wallets/{id}/settings", put(settings::change))
        .route("/wallets/{id}/payouts", post(payouts::request))
        .route("/transfers", post(transfers::transfer))
        .route("/customers/{id}", get(customers::show))
        .route(
            "/customers/{id}/withdrawals",
            post(customers::withdraw_by_total),
        )
        .route(
            "/customers/{id}/withdrawals/by-lock",
            post(customers::withdraw_by_lock),
        )
        .route(
            "/customers/{id}/withdrawals/serializable",
            post(customers::withdraw_serializable),
        )
}

/// One layer for all routes. A POST needs a key. A PUT may have one; without, it is a plain transaction.
pub fn layer(store: PostgresStore) -> IdempotencyLayer<PostgresStore> {
    // The cures are thought out for read committed, whatever the database's default. At repeatable read a
    // lock that was waited for would be of no use: what is read after it is as old as the transaction.
    let transactions = TxOptions::default().isolation(Isolation::ReadCommitted);
    IdempotencyLayer::new(store)
        .methods([Method::POST, Method::PATCH, Method::PUT])
        .scope(client)
        .transactional_with(transactions)
}

/// Stands for authentication, which a real service has outside the layer: a header that callers make up
/// lets each of them into everybody's scope.
fn client(head: &request::Parts) -> Option<Scope> {
    let id = head.headers.get("x-client-id")?;
    (!id.is_empty()).then(|| Scope::new(id))
}

/// Creates the tables, and the first wallets and customers, where they are missing.
pub async fn create_tables(pool: &PgPool) -> Result<(), sqlx::Error> {
    // Several statements sent as one text are one transaction.
    let tables = sqlx::raw_sql(include_str!("tables.sql"));
    tables.execute(pool).await.map(drop)
}
