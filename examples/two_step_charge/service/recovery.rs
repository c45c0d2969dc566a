//! What became of a charge whose run was cut off. Asked by the retry that meets its record, and by the sweeps.

use std::error::Error;

use tower_idempotency::{Abandoned, Verdict};

use super::{
    Service, Step,
    charges::{self, CHARGE, VERDICT},
    ledger::{self, Status},
};

/// Takes the charge to its end where its run got as far as the provider, and answers as that run would have.
pub async fn resolve(service: Service, abandoned: Abandoned) -> Verdict {
    match find_out(&service, &abandoned).await {
        Ok(verdict) => verdict,
        Err(why) => {
            // Somebody does not answer, or not comprehensibly. That says nothing about the money, so the
            // record stays as it is, and is asked about again later.
            tracing::warn!(%why, "the fate of a charge cannot be found out for now");
            Verdict::Leave
        }
    }
}

async fn find_out(
    service: &Service,
    abandoned: &Abandoned,
) -> Result<Verdict, Box<dyn Error + Send + Sync>> {
    let (Some(client), Some(key)) = (abandoned.scope(), abandoned.key()) else {
        // Only a store that hashes names hides them; this service has none.
        return Ok(Verdict::Leave);
    };
    let found = ledger::find_by_key(&service.ledger, client.as_bytes(), key.as_bytes()).await?;
    let Some(charge) = found else {
        // The row comes before the provider is asked.
        return Ok(Verdict::DidNotHappen);
    };
    if charge.status != Status::Reserved {
        return Ok(Verdict::answer(charges::answer(&charge)));
    }
    let verdict = match abandoned.checkpoint(VERDICT)? {
        Some(noted) => Some(noted),
        None => {
            let key = abandoned.downstream_key(CHARGE)?;
            service.gateway.look_up(&key).await?
        }
    };
    (service.pause)(Step::LookedUp).await;
    let Some(verdict) = verdict else {
        // The provider may still get the order: from the network, or from the old run, should that be slow
        // and not dead. So "did not happen, and never will" is more than we know, and the key may be freed
        // all the same: whoever runs next asks under the same downstream key, and the provider charges that
        // once. Until then the row stays reserved, so the money is spoken for; the retry goes on with that row.
        // Where a provider has no such keys, only waiting for longer than any order can be under way helps.
        return Ok(Verdict::DidNotHappen);
    };
    let charge = ledger::settle(&service.ledger, charge.id, &verdict).await?;
    Ok(Verdict::answer(charges::answer(&charge)))
}
