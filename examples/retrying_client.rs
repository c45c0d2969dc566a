//! A client that retries, against a server that fails on purpose: `cargo run --example retrying_client --features client`.
//!
//! It starts the server itself, on loopback and with its data in a temporary folder, plays three scenes and prints
//! what happened when. It ends with status 0 if every scene has made exactly one charge.

use std::{
    error::Error,
    io::{self, Write},
    net::SocketAddr,
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{OriginalUri, State},
    http::{Request, Response, StatusCode},
    middleware::{self, Next},
    response::IntoResponse,
    routing::post,
};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use sqlx::{SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{
    io::{AsyncReadExt, copy, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    IdempotencyLayer, SqliteStore,
    client::{Attempt, RetryLayer},
};

type Failure = Box<dyn Error + Send + Sync>;

/// How long the handler of the slow scene takes, and how long the client waits for one answer there.
const SLOW: Duration = Duration::from_millis(1_200);
const PATIENCE: Duration = Duration::from_millis(300);

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let folder = tempfile::tempdir()?;
    let charges = open_charges(folder.path()).await?;
    let server = serve(folder.path(), charges.clone()).await?;
    let network = bad_network(server).await?;

    let layer = RetryLayer::new().back_off(Duration::from_millis(100), Duration::from_secs(1));
    let impatient = layer.clone().attempt_timeout(PATIENCE);
    let lost = "The answer is lost: the connection is reset after the charge was committed.";
    play(network, "lost", lost, &layer).await?;
    let away = "Away: two times 503, before any handler.";
    play(network, "away", away, &layer).await?;
    let slow = "Slow: the first run takes longer than the client waits for one answer.";
    play(network, "slow", slow, &impatient).await?;

    account(&charges).await
}

/// One charge, and what became of its attempts.
async fn play(to: SocketAddr, scene: &str, title: &str, layer: &RetryLayer) -> Result<(), Failure> {
    say(title);
    let client = layer.layer(told(Instant::now()));
    let request = Request::post(format!("http://{to}/charges/{scene}"));
    let answered = client.oneshot(request.body(Body::from("250 baht"))?).await;
    // A real caller would keep the key, and look up what became of it.
    if let Err(unanswered) = answered {
        say(&format!("  {unanswered}"));
    }
    say("");
    Ok(())
}

/// What the server has in its books.
async fn account(charges: &SqlitePool) -> Result<ExitCode, Failure> {
    say("What the server charged:");
    let query = "SELECT scene, COUNT(*) FROM charges GROUP BY scene ORDER BY MIN(rowid)";
    let made: Vec<(String, i64)> = sqlx::query_as(query).fetch_all(charges).await?;
    for (scene, times) in &made {
        say(&format!("  {scene}: {times}"));
    }
    let all: i64 = made.iter().map(|(_, times)| times).sum();
    let is_right = made.len() == 3 && all == 3;
    say(&match is_right {
        true => format!("charges made: {all}, one per scene"),
        false => format!("charges made: {all}, which is wrong"),
    });
    Ok(ExitCode::from(u8::from(!is_right)))
}

fn say(line: &str) {
    // Nobody may be listening any more, which is no failure of the scenes.
    let _ = writeln!(io::stdout(), "{line}");
}

// The client: hyper-util's, and a line for each attempt.

fn told(
    begun: Instant,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Failure, Future: Send>
+ Clone
+ Send
+ 'static {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    service_fn(move |request: Request<Body>| {
        // Every request brings along which attempt it is.
        let line = Line::new(begun, request.extensions().get());
        let client = client.clone();
        async move {
            let answer = whole(client.request(request).await).await;
            line.says(
                &answer
                    .as_ref()
                    .map_or_else(|error| failure(&**error), outcome),
            );
            answer.map(|(response, body)| response.map(|()| Body::from(body)))
        }
    })
}

type Whole = (Response<()>, bytes::Bytes);

/// The answer with its body, so that its code can be told.
async fn whole<B>(
    answer: Result<Response<B>, hyper_util::client::legacy::Error>,
) -> Result<Whole, Failure>
where
    B: http_body::Body<Error: Into<Failure>>,
{
    let (head, body) = answer?.into_parts();
    let body = body.collect().await.map_err(Into::into)?.to_bytes();
    Ok((Response::from_parts(head, ()), body))
}

fn outcome((response, body): &Whole) -> String {
    let problem: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let code = problem["code"].as_str().map(|code| format!(", {code}"));
    let replayed = response.headers().contains_key("idempotent-replay");
    let marker = if replayed { ", replayed" } else { "" };
    format!("{}{}{marker}", response.status(), code.unwrap_or_default())
}

fn failure(error: &(dyn Error + 'static)) -> String {
    let mut cause = Some(error);
    while let Some(error) = cause {
        match error.downcast_ref::<io::Error>() {
            Some(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return "connection reset".to_owned();
            }
            _ => cause = error.source(),
        }
    }
    error.to_string()
}

/// The line of one attempt: if nothing is said by the time it is dropped, the client has waited long enough.
struct Line {
    begun: Instant,
    attempt: u32,
    is_said: bool,
}

impl Line {
    fn new(begun: Instant, attempt: Option<&Attempt>) -> Self {
        Self {
            begun,
            attempt: attempt.map_or(0, |attempt| attempt.number),
            is_said: false,
        }
    }

    fn says(mut self, what: &str) {
        self.print(what);
    }

    fn print(&mut self, what: &str) {
        self.is_said = true;
        let at = self.begun.elapsed().as_secs_f64();
        say(&format!("  {at:.3} s attempt {}: {what}", self.attempt));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.is_said {
            self.print("no answer in time");
        }
    }
}

// The server.

async fn open_charges(folder: &Path) -> Result<SqlitePool, sqlx::Error> {
    let file = SqliteConnectOptions::new().filename(folder.join("charges.db"));
    let charges = SqlitePool::connect_with(file.create_if_missing(true)).await?;
    let table = sqlx::query("CREATE TABLE charges (scene TEXT NOT NULL, what TEXT NOT NULL)");
    table.execute(&charges).await?;
    Ok(charges)
}

async fn serve(folder: &Path, charges: SqlitePool) -> Result<SocketAddr, Failure> {
    let store = SqliteStore::open(folder.join("idempotency.db")).await?;
    let layer = IdempotencyLayer::new(store).single_tenant();
    let app = Router::new()
        .route("/charges/{scene}", post(charge))
        .route_layer(layer)
        // Outside of the layer: a refusal from here has no record.
        .layer(middleware::from_fn_with_state(Arc::default(), away))
        .with_state(charges);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

async fn charge(
    State(charges): State<SqlitePool>,
    OriginalUri(uri): OriginalUri,
    what: String,
) -> Response<Body> {
    let scene = uri.path().trim_start_matches("/charges/");
    let made = sqlx::query("INSERT INTO charges (scene, what) VALUES (?, ?)");
    let made = made.bind(scene).bind(what).execute(&charges).await;
    if scene == "slow" {
        tokio::time::sleep(SLOW).await;
    }
    match made {
        Ok(made) => (
            StatusCode::CREATED,
            format!("ch_{}", made.last_insert_rowid()),
        ),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    }
    .into_response()
}

/// Refuses the first two requests of its scene.
async fn away(
    State(asked): State<Arc<AtomicU32>>,
    request: Request<Body>,
    next: Next,
) -> Response<Body> {
    let is_away = request.uri().path() == "/charges/away";
    if is_away && asked.fetch_add(1, Ordering::SeqCst) < 2 {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    next.run(request).await
}

// The network between them, which loses the first answer of all.

async fn bad_network(server: SocketAddr) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        let mut is_first = true;
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(carry(client, server, is_first));
            is_first = false;
        }
    });
    Ok(address)
}

async fn carry(mut client: TcpStream, server: SocketAddr, loses_answer: bool) -> io::Result<()> {
    let mut server = TcpStream::connect(server).await?;
    if !loses_answer {
        copy_bidirectional(&mut client, &mut server).await?;
        return Ok(());
    }
    let (mut from_client, _) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let mut answer = [0; 1];
    tokio::select! {
        copied = copy(&mut from_client, &mut to_server) => drop(copied?),
        // It has answered, so it has committed; and nobody will hear of it.
        read = from_server.read(&mut answer) => drop(read?),
    }
    client.set_zero_linger()?;
    Ok(())
}
