//! The service as it is served.

use sqlx::postgres::PgPoolOptions;
use tower_idempotency::PostgresStore;

use crate::{
    service,
    support::{database::Database, wire::Server},
};

fn withdrawal(key: &str) -> Vec<u8> {
    let body = r#"{"amount_satang":25000}"#;
    format!(
        "POST /wallets/1/withdrawals HTTP/1.1\r\nhost: test\r\nx-client-id: shop\r\n\
         content-type: application/json\r\nidempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn double_clicks_and_retries_over_tcp_are_one_withdrawal_each() {
    let database = Database::in_real_time();
    let pool = PgPoolOptions::new().max_connections(8);
    let pool = pool.connect_lazy_with(database.options());
    service::create_tables(&pool).await.unwrap();
    let store = PostgresStore::options().migrate().open(pool.clone());
    let layer = service::layer(store.await.unwrap());
    let server = Server::start(service::app(pool, layer)).await;

    for number in 0..50 {
        let click = withdrawal(&format!("w-{number}"));
        let (one, other) = tokio::join!(server.exchange(&click), server.exchange(&click));
        let (first, second) = match one.is_replay() || one.status == 409 {
            true => (other, one),
            false => (one, other),
        };
        assert_eq!((first.status, first.is_replay()), (201, false));
        if !second.is_replay() {
            assert_eq!(second.said(), (409, "idempotency_in_flight".to_owned()));
            assert_eq!(second.header("retry-after"), Some(&b"1"[..]));
        }
        let retry = server.exchange(&click).await;
        assert_eq!((retry.status, retry.is_replay()), (201, true));
        assert_eq!(retry.body, first.body);
    }
    let wallet = server
        .exchange(b"GET /wallets/1 HTTP/1.1\r\nhost: test\r\n\r\n")
        .await;
    let wallet: serde_json::Value = serde_json::from_slice(&wallet.body).unwrap();
    assert_eq!(wallet["balance_satang"], 10_000_000 - 50 * 25_000);
}
