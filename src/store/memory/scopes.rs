//! How many records each scope has.

use std::collections::HashMap;

use crate::Scope;

/// Counts records by scope. Those without a scope, which every claim of a service without tenants adds to,
/// are not counted here: there are as many of them as are left.
#[derive(Default)]
pub(super) struct Scopes {
    counts: HashMap<Scope, usize>,
    records: usize,
}

impl Scopes {
    pub(super) fn add(&mut self, scope: &Scope) {
        if scope.as_bytes().is_empty() {
            return;
        }
        self.records += 1;
        match self.counts.get_mut(scope) {
            Some(count) => *count += 1,
            None => {
                self.counts.insert(scope.clone(), 1);
            }
        }
    }

    pub(super) fn remove(&mut self, scope: &Scope) {
        let Some(count) = self.counts.get_mut(scope) else {
            return;
        };
        self.records -= 1;
        *count -= 1;
        if *count == 0 {
            self.counts.remove(scope);
        }
    }

    pub(super) fn count(&self, scope: &Scope) -> usize {
        self.counts.get(scope).copied().unwrap_or(0)
    }

    /// How many records have a scope.
    pub(super) fn records(&self) -> usize {
        self.records
    }

    /// How many scopes have a record.
    #[cfg(all(test, feature = "testing"))]
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    pub(super) fn shrink(&mut self) {
        if self.counts.capacity() > 4 * self.counts.len() + 1024 {
            self.counts.shrink_to_fit();
        }
    }
}
