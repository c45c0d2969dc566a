//! Commands to try, printed with this process's addresses and id.

use std::{
    io::{self, Write},
    net::SocketAddr,
};

pub fn print(address: SocketAddr, provider: SocketAddr) {
    let send = "curl -i -H 'Content-Type: application/json' -H 'X-Client-Id:";
    let tour = TOUR.replace("SEND", send);
    let tour = tour.replace("PROVIDER", &format!("http://{provider}/charges"));
    let tour = tour.replace("URL", &format!("http://{address}"));
    let tour = tour.replace("KEY", "Idempotency-Key");
    let tour = tour.replace("PID", &std::process::id().to_string());
    let began = format!("listening on http://{address}\nprovider on http://{provider}");
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "{began}\n{tour}");
}

const TOUR: &str = r#"
# A charge, and its retry: the provider is asked once.
SEND shop' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
SEND shop' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
# More than the provider lets pass: declined, and the budget has it back.
SEND shop' -H 'KEY: c-2' -d '{"amount_minor":500001,"currency":"THB"}' URL/charges
curl -H 'X-Client-Id: shop' URL/budgets/THB
# The same key of another client is another charge.
SEND stall' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
curl PROVIDER

# Kill it at a point of your choice: stop this one with Ctrl-C, start
#   KILL_AT=before-provider LEASE_MS=3000 cargo run --example two_step_charge
# and send an order, under a fresh key for every point. The process dies, and curl gets an empty reply.
SEND shop' -H 'KEY: c-3' -d '{"amount_minor":700,"currency":"THB"}' URL/charges
# Start it again without KILL_AT. For three seconds, the lease of the dead one, a retry is told that the first
# attempt is in flight. Then the next sweep, a second later at most, asks the provider and closes the record.
sleep 5
SEND shop' -H 'KEY: c-3' -d '{"amount_minor":700,"currency":"THB"}' URL/charges
# How many charges there are: `curl` what the new process prints for the provider, which has another port now.
# before-provider: the provider knows of nothing, so the retry runs and charges: 201, unmarked.
# after-provider:  charged, and nobody here knows: the provider tells, and the retry gets 201, replayed.
# before-settle:   the same from a checkpoint, and the provider is not even asked.
# before-record:   all is done but the record: the same from the row.
# Whichever it was, there is one charge more.
# while-resolving: kill it at another point first, start it with this one, and it dies in the sweep. Started once
# more, it waits for as long as the dead one might have asked (half a minute), and asks again.
"#;
