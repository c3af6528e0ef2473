//! Subsystems that were deleted while a pool with a record of them was away.
//!
//! The record in that pool cannot be struck, and must not bring the subsystem back when the pool does. So the deletion is
//! recorded in every pool that is here, until the last of those that were away has come and lost its record. It names
//! the one subsystem that was deleted, not its NQN, which may be given to another meanwhile.
#![forbid(unsafe_code)]

use super::Daemon;
use super::changes::KEY_PREFIX;
use super::exports::{ChangeError, Record};
use super::lookup::pool_error;
use crate::pool::Pool;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Where deletions lie in a pool's catalog; the subsystem's identity follows.
const DELETED_PREFIX: &str = "deleted-subsystem/";

/// One deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Deletion {
    /// For people.
    nqn: String,
    /// The pools that have not lost their record.
    pools: BTreeSet<Uuid>,
}

/// Each is called under [`Exports::lock`](super::exports::Exports::lock), or before anyone can call.
impl Daemon {
    /// Records that a subsystem is deleted, for the pools with a record of it that are not here.
    pub(super) async fn record_deletion(&self, record: &Record) -> Result<(), ChangeError> {
        let here: BTreeSet<Uuid> = self.pools.list().iter().map(|pool| pool.uuid()).collect();
        let pools: BTreeSet<Uuid> = record.pools.difference(&here).copied().collect();
        if pools.is_empty() {
            return Ok(());
        }
        self.exports.deleted.borrow_mut().insert(record.id, Deletion { nqn: record.nqn.clone(), pools });
        self.write_deletion(record.id).await
    }

    /// Takes over the deletions that a pool records.
    pub(super) async fn read_deletions(&self, pool: &Pool) {
        let stored = match pool.config_list(DELETED_PREFIX).await {
            Ok(stored) => stored,
            Err(error) => {
                return tracing::error!(pool = pool.name(), %error, "the recorded deletions cannot be read");
            }
        };
        for (key, value) in stored {
            let id = key.strip_prefix(DELETED_PREFIX).and_then(|id| Uuid::try_parse(id).ok());
            let (Some(id), Ok(deletion)) = (id, serde_json::from_value::<Deletion>(value)) else {
                tracing::error!(pool = pool.name(), key, "a recorded deletion cannot be read");
                continue;
            };
            if self.exports.all().iter().any(|record| record.id == id) {
                // It came back with a pool where nothing told of its deletion, and hosts may use it.
                tracing::warn!(nqn = deletion.nqn, "a subsystem that was deleted elsewhere stays");
                if let Err(error) = pool.config_put(&key, None).await {
                    tracing::error!(pool = pool.name(), %error, "a deletion cannot be struck");
                }
                continue;
            }
            let mut deleted = self.exports.deleted.borrow_mut();
            deleted
                .entry(id)
                .or_insert(Deletion { nqn: deletion.nqn, pools: BTreeSet::new() })
                .pools
                .extend(deletion.pools);
        }
    }

    /// Strikes the record of a deleted subsystem from a pool that has come back. False if it is not deleted.
    pub(super) async fn bury(&self, pool: &Pool, record: &Record) -> bool {
        let known = |deletion: &Deletion| deletion.pools.contains(&pool.uuid());
        if !self.exports.deleted.borrow().get(&record.id).is_some_and(known) {
            return false;
        }
        tracing::info!(pool = pool.name(), nqn = record.nqn, "was deleted while this pool was away");
        if let Err(error) = pool.config_put(&format!("{KEY_PREFIX}{}", record.nqn), None).await {
            // It stays deleted, and the next import tries again.
            tracing::error!(pool = pool.name(), %error, "the record of a deleted subsystem cannot be struck");
            return true;
        }
        if let Some(deletion) = self.exports.deleted.borrow_mut().get_mut(&record.id) {
            deletion.pools.remove(&pool.uuid());
        }
        if let Err(error) = self.write_deletion(record.id).await {
            tracing::error!(?error, "a deletion that is complete cannot be struck");
        }
        true
    }

    /// Writes a deletion into every pool that is here, or strikes it where no pool is left that it is for.
    async fn write_deletion(&self, id: Uuid) -> Result<(), ChangeError> {
        let deletion =
            self.exports.deleted.borrow().get(&id).cloned().filter(|deletion| !deletion.pools.is_empty());
        if deletion.is_none() {
            self.exports.deleted.borrow_mut().remove(&id);
        }
        for pool in self.pools.list() {
            let value = deletion.as_ref().and_then(|deletion| serde_json::to_value(deletion).ok());
            pool.config_put(&format!("{DELETED_PREFIX}{id}"), value).await.map_err(pool_error)?;
        }
        Ok(())
    }
}
