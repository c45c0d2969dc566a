//! What was logged, by the request it was logged for.

use std::{
    fmt::{Debug, Write},
    io,
    sync::{Arc, Mutex, OnceLock},
};

use tracing::{
    Event, Level, Metadata, Span, Subscriber,
    field::{Field, Visit},
    subscriber::DefaultGuard,
};
use tracing_subscriber::{
    Registry,
    fmt::{MakeWriter, format::FmtSpan},
    layer::{Context, Layer, SubscriberExt},
    registry::LookupSpan,
};

/// One event.
#[derive(Debug, Clone)]
pub struct Logged {
    pub level: Level,
    pub target: String,
    /// Message and fields in one line.
    pub text: String,
    /// The names of the spans it happened in, the innermost first.
    pub spans: Vec<&'static str>,
    ids: Vec<u64>,
}

impl Logged {
    /// At warn or above.
    pub fn is_loud(&self) -> bool {
        self.level <= Level::WARN
    }
}

/// The events collected so far.
#[derive(Clone, Default)]
pub struct Logs(Arc<Mutex<Vec<Logged>>>);

impl Logs {
    /// Collects everything of the whole test binary; look at it by span.
    pub fn everywhere() -> Self {
        static LOGS: OnceLock<Logs> = OnceLock::new();
        let logs = LOGS.get_or_init(|| {
            let logs = Logs::default();
            let subscriber = Registry::default().with(Collect(logs.clone()));
            tracing::subscriber::set_global_default(subscriber).unwrap();
            logs
        });
        logs.clone()
    }

    /// Collects everything of this thread, and so of a test on a runtime of one thread, background
    /// work included, until the guard is dropped.
    pub fn of_this_thread() -> (Self, DefaultGuard) {
        let logs = Logs::default();
        let subscriber = Registry::default().with(Collect(logs.clone()));
        (logs, tracing::subscriber::set_default(subscriber))
    }

    pub fn all(&self) -> Vec<Logged> {
        self.0.lock().unwrap().clone()
    }

    /// What happened within this span, which must still be open.
    pub fn within(&self, span: &Span) -> Vec<Logged> {
        let id = span.id().expect("nobody listens to this span").into_u64();
        let mut logged = self.all();
        logged.retain(|event| event.ids.contains(&id));
        logged
    }

    /// Everything at warn or above that contains this text.
    pub fn loud(&self, text: &str) -> Vec<Logged> {
        let mut logged = self.all();
        logged.retain(|event| event.is_loud() && event.text.contains(text));
        logged
    }
}

struct Collect(Logs);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collect {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        // What other crates have to say below warn is much, and nobody asks for it here.
        metadata.is_span()
            || metadata.target().starts_with("tower_idempotency")
            || metadata.target().starts_with("test")
            || *metadata.level() <= Level::WARN
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        let spans = || context.event_scope(event).into_iter().flatten();
        let logged = Logged {
            level: *event.metadata().level(),
            target: event.metadata().target().to_owned(),
            text: line.0,
            spans: spans().map(|span| span.name()).collect(),
            ids: spans().map(|span| span.id().into_u64()).collect(),
        };
        self.0.0.lock().unwrap().push(logged);
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?} "),
            name => write!(self.0, "{name}={value:?} "),
        };
    }
}

/// The log as text, as a service writes it with everything turned on.
#[derive(Clone, Default)]
pub struct Written(Arc<Mutex<Vec<u8>>>);

impl Written {
    /// Everything any crate of this process has logged, at every level.
    pub fn everywhere() -> Self {
        static WRITTEN: OnceLock<Written> = OnceLock::new();
        let written = WRITTEN.get_or_init(|| {
            let written = Written::default();
            tracing::subscriber::set_global_default(written.subscriber()).unwrap();
            written
        });
        written.clone()
    }

    /// Everything of this thread, until the guard is dropped.
    pub fn of_this_thread() -> (Self, DefaultGuard) {
        let written = Written::default();
        let guard = tracing::subscriber::set_default(written.subscriber());
        (written, guard)
    }

    pub fn subscriber(&self) -> impl Subscriber + Send + Sync + use<> {
        tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_span_events(FmtSpan::FULL)
            .with_ansi(false)
            .with_writer(self.clone())
            .finish()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }
}

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Written {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
