//! What a handler answers, and how long it takes.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode},
};
use tokio::time::sleep;

/// Names the run in every answer that stands.
pub const RUN: &str = "x-run";

pub async fn dawdle(milliseconds: u64) {
    let milliseconds = rand::random_range(0..=milliseconds);
    sleep(Duration::from_millis(milliseconds)).await;
}

/// No two runs answer alike.
pub fn answer(status: StatusCode, action: &str, run: &str) -> Response<Body> {
    let mut answer = Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .header("location", format!("/charges/{run}"))
        .header(RUN, run);
    for _ in 0..rand::random_range(0..3) {
        // What else a header may hold: spaces, and bytes beyond ASCII.
        let mut value = *b"<  >; rel=";
        value[1..3].fill_with(|| rand::random_range(0x80..=0xff));
        answer = answer.header("link", HeaderValue::from_bytes(&value).unwrap());
    }
    let large = rand::random_ratio(1, 8);
    let filler = if large {
        rand::random_range(0..200_000)
    } else {
        0
    };
    let filler = run.repeat(filler / run.len());
    let body = format!("{{\"action\":\"{action}\",\"run\":\"{run}\",\"filler\":\"{filler}\"}}");
    answer.body(Body::from(body)).unwrap()
}
