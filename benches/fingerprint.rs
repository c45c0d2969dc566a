//! What `CanonicalJson` takes beside `ExactRequest`, which hashes the same bytes as they are:
//! `cargo bench --all-features --bench fingerprint`.
//!
//! Every round takes each document once under each scheme, so that slow moments of the machine hit all alike;
//! printed are the least time of all rounds and the median. They tell different things. A neighbour on the same
//! core slows the reading of a document down, and not the hashing, which waits for itself only: so the ratio of
//! the least times is what the code costs, and that of the medians what it cost here. Documents have one
//! mebibyte, the default limit of a body, and most have their members in an order that has to be mended: what
//! a friendly client sends is cheaper. The second table has the same kinds of documents in four sizes: a cost
//! that grew faster than n log n would show there.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, request::Parts};
use tower_idempotency::{CanonicalJson, ExactRequest, FingerprintScheme};

const MEBIBYTE: usize = 1 << 20;
const ROUNDS: usize = 101;
const TARGET: f64 = 5.0;

/// Numbers that are the same in every run.
struct Shuffle(u64);

impl Shuffle {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    fn shuffled(&mut self, mut members: Vec<String>) -> String {
        for at in (1..members.len()).rev() {
            let other = self.below(at + 1);
            members.swap(at, other);
        }
        members.join(",")
    }
}

/// As many items as fit.
fn items(size: usize, item: impl Fn(usize) -> String) -> Vec<String> {
    let mut left = size - 2;
    let mut items = Vec::new();
    loop {
        let item = item(items.len());
        let Some(rest) = left.checked_sub(item.len() + 1) else {
            return items;
        };
        left = rest;
        items.push(item);
    }
}

fn array(size: usize, item: impl Fn(usize) -> String) -> String {
    format!("[{}]", items(size, item).join(","))
}

fn object(size: usize, member: impl Fn(usize) -> String) -> String {
    format!("{{{}}}", Shuffle(11).shuffled(items(size, member)))
}

fn text(size: usize, of: &str) -> String {
    format!("{{\"text\":\"{}\"}}", of.repeat((size - 11) / of.len()))
}

/// A payment whose members stand in the order in which somebody thought of them.
fn payment(n: usize, colon: &str, comma: &str) -> String {
    [
        format!("\"id\"{colon}\"pay_{n:08}\""),
        format!("\"amount\"{colon}{}", n * 37 % 100_000),
        format!("\"currency\"{colon}\"THB\""),
        format!("\"customer\"{colon}{{\"name\"{colon}\"Somchai\"{comma}\"email\"{colon}\"s{n}@shop.example\"}}"),
        format!("\"captured\"{colon}true"),
    ]
    .join(comma)
}

/// Levels in each other, each with members in no order.
fn nested(levels: usize) -> String {
    let level =
        |n| format!("{{\"type\":\"group\",\"id\":{n},\"name\":\"level {n}\",\"children\":[");
    let open: String = (0..levels).map(level).collect();
    format!("{open}{}", "],\"count\":1}".repeat(levels))
}

/// The most levels, each an object with many members in no order around the next one.
fn wide_and_deep(size: usize) -> String {
    let mut shuffle = Shuffle(5);
    (0..128).fold("1".to_owned(), |inside, level| {
        let mut members = items(size / 128, |n| {
            format!("\"member_{:04}\":{level}", n * 7 % 9_973)
        });
        members.push(format!("\"inside\":{inside}"));
        format!("{{{}}}", shuffle.shuffled(members))
    })
}

type Document = (&'static str, fn(usize) -> String);

const DOCUMENTS: &[Document] = &[
    ("array of payments", |size| {
        array(size, |n| format!("{{{}}}", payment(n, ":", ",")))
    }),
    ("array of payments, `: ` and `, `", |size| {
        array(size, |n| format!("{{{}}}", payment(n, ": ", ", ")))
    }),
    ("array of payments, indented", |size| {
        array(size, |n| {
            format!("\n  {{\n    {}\n  }}", payment(n, ": ", ",\n    "))
        })
    }),
    ("array of objects of ten members, shuffled", |size| {
        array(size, |n| {
            let members = (0..10).map(|field| format!("\"field_{field}\":{n}"));
            format!("{{{}}}", Shuffle(n as u64 + 1).shuffled(members.collect()))
        })
    }),
    ("one object, `\"member_000001\":12345`", |size| {
        object(size, |n| format!("\"member_{n:06}\":12345"))
    }),
    ("one object, names of 16 random digits", |size| {
        object(size, |n| {
            format!(
                "\"{:016x}\":\"paid\"",
                (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            )
        })
    }),
    ("one object, names with 40 bytes in common", |size| {
        object(size, |n| {
            format!("\"the_common_prefix_of_all_of_these_names_{n:06}\":1")
        })
    }),
    (
        "one object, all names but one with 40 bytes in common",
        |size| {
            object(size, |n| match n {
                0 => "\"z\":1".to_owned(),
                _ => format!("\"the_common_prefix_of_all_of_these_names_{n:06}\":1"),
            })
        },
    ),
    (
        "one object, each name one byte longer than the last",
        |size| object(size, |n| format!("\"{}\":1", "a".repeat(n))),
    ),
    ("one string", |size| {
        text(size, "All of this stands as it is. ")
    }),
    ("one string, not ASCII", |size| text(size, "จ่ายเงินแล้ว")),
    ("one string, quotes and line ends", |size| {
        text(size, "He said \\\"pay\\\".\\n")
    }),
    ("one string, all of it `\\u0e08`", |size| {
        text(size, "\\u0e08")
    }),
    ("numbers", |size| {
        array(size, |n| format!("{}.{:02}", n * 7 % 10_000, n % 100))
    }),
    ("127 levels in each other, again and again", |size| {
        array(size.max(8 << 10), |_| nested(63))
    }),
    ("128 levels in each other, each with 8 KiB", wide_and_deep),
];

fn head() -> Parts {
    let request = Request::post("/payments").header("content-type", "application/json");
    request.body(()).expect("a request").into_parts().0
}

/// A document, and how long it took under each scheme in each round.
struct Measured {
    name: &'static str,
    body: Bytes,
    exact: Vec<Duration>,
    canonical: Vec<Duration>,
}

impl Measured {
    fn new(name: &'static str, document: String) -> Self {
        Self {
            name,
            body: document.into(),
            exact: Vec::new(),
            canonical: Vec::new(),
        }
    }

    fn take_turn(&mut self, head: &Parts, json: &CanonicalJson) {
        let time = |scheme: &dyn FingerprintScheme| {
            let start = Instant::now();
            let found = scheme.fingerprint(black_box(head), black_box(&self.body));
            let taken = start.elapsed();
            black_box(found).expect("a digest");
            taken
        };
        let (exact, canonical) = (time(&ExactRequest), time(json));
        self.exact.push(exact);
        self.canonical.push(canonical);
    }

    fn sort(&mut self) {
        self.exact.sort();
        self.canonical.sort();
    }

    /// After the times are sorted: that of this place, under both schemes, in microseconds.
    fn at(&self, place: usize) -> (f64, f64) {
        let micros = |times: &[Duration]| times[place].as_nanos() as f64 / 1e3;
        (micros(&self.exact), micros(&self.canonical))
    }
}

/// All documents of this size.
fn measure(size: usize) -> Vec<Measured> {
    let (head, json) = (head(), CanonicalJson::new());
    let documents = DOCUMENTS.iter();
    let mut all: Vec<_> = documents
        .map(|(name, document)| Measured::new(name, document(size)))
        .collect();
    for _ in 0..ROUNDS {
        for document in &mut all {
            document.take_turn(&head, &json);
        }
    }
    for document in &mut all {
        document.sort();
    }
    all
}

fn print_times(all: &[Measured]) {
    println!(
        "| document | `ExactRequest`: least | `CanonicalJson`: least | ratio | median ratio |"
    );
    println!("| --- | --- | --- | --- | --- |");
    for document in all {
        let (exact, canonical) = document.at(0);
        let (exact_median, canonical_median) = document.at(ROUNDS / 2);
        println!(
            "| {} | {exact:.0} µs | {canonical:.0} µs | {:.1} × | {:.1} × |",
            document.name,
            canonical / exact,
            canonical_median / exact_median
        );
    }
}

fn print_growth(large: &[Measured]) {
    println!("\nNanoseconds per byte, least:\n");
    println!("| document | 16 KiB | 64 KiB | 256 KiB | 1 MiB |");
    println!("| --- | --- | --- | --- | --- |");
    let small = [16, 64, 256].map(|kibibytes| measure(kibibytes << 10));
    for (at, document) in large.iter().enumerate() {
        let sizes = small.iter().map(|all| &all[at]).chain([document]);
        let per_byte: Vec<_> = sizes
            .map(|document| format!("{:.2}", document.at(0).1 * 1e3 / document.body.len() as f64))
            .collect();
        println!("| {} | {} |", document.name, per_byte.join(" | "));
    }
}

fn print_verdict(all: &[Measured], what: &str, place: usize) {
    let missed = all.iter().filter(|document| {
        let (exact, canonical) = document.at(place);
        canonical / exact > TARGET
    });
    match missed
        .map(|document| document.name)
        .collect::<Vec<_>>()
        .as_slice()
    {
        [] => println!("{what} ≤ {TARGET}: yes"),
        missed => println!("{what} ≤ {TARGET}: NO, not {missed:?}"),
    }
}

fn main() {
    // `cargo test --benches` passes this; there is nothing to measure then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let all = measure(MEBIBYTE);
    print_times(&all);
    print_growth(&all);
    println!();
    print_verdict(&all, "all ratios of the least times", 0);
    print_verdict(&all, "all ratios of the medians", ROUNDS / 2);
}
