//! What a person looks at, thinks about, and changes.

use axum::{Json, extract::Path};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Tx, drill::Pause, given::Amount, given::Given, ledger, refused::Refused};

#[derive(Deserialize)]
pub struct Settings {
    /// As it was when the caller looked.
    version: i64,
    label: String,
    /// Left out, it stays as it is.
    daily_limit_satang: Option<Amount>,
}

/// Changes the settings, unless somebody has since the caller looked.
///
/// The right cure where minutes pass between reading and writing: no lock can be held for so long, and the
/// caller, who has to look again, is the one to be told. For counters and balances it is the wrong one:
/// nobody needs to look again there, and under load most attempts would be for nothing.
pub async fn change(
    mut tx: Tx,
    Path(wallet): Path<i64>,
    pause: Pause,
    Given(settings): Given<Settings>,
) -> Result<Json<Value>, Refused> {
    let label = settings.label.trim();
    if label.is_empty() || label.len() > 200 || label.contains(char::is_control) {
        return Err(Refused::unprocessable("invalid_label"));
    }
    let changed = sqlx::query_as(
        "UPDATE wallet_accounts
         SET label = $3, daily_limit_satang = coalesce($4, daily_limit_satang), version = version + 1
         WHERE id = $1 AND version = $2
         RETURNING daily_limit_satang, version",
    );
    let changed = changed.bind(wallet).bind(settings.version).bind(label);
    let changed = changed.bind(settings.daily_limit_satang.map(|Amount(limit)| limit));
    let (limit, version): (i64, i64) = match changed.fetch_optional(&mut tx).await? {
        Some(changed) => changed,
        None if ledger::exists(&mut tx, wallet).await? => {
            return Err(Refused::conflict("version_conflict"));
        }
        None => return Err(Refused::missing()),
    };
    pause.take().await?;
    Ok(Json(json!({
        "label": label,
        "daily_limit_satang": limit,
        "version": version,
    })))
}
