//! The limits of the transport, kept in every pool's catalog.
//!
//! They belong to no pool, and a pool may be moved to another machine. So each record says when it was made: what an
//! operator set in this life of the daemon stands; otherwise the newest of the records does, and goes into the other pools.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use super::lookup::pool_error;
use crate::pool::Pool;
use crate::target::{C2hSuccess, TargetError, TransportOptions};
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

const KEY: &str = "transport";

/// The limits as they were set, by SPDK's names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TransportRecord {
    max_queue_depth: u16,
    max_io_qpairs_per_ctrlr: u16,
    in_capsule_data_size: u32,
    max_io_size: u32,
    c2h_success: bool,
    /// When it was set, milliseconds since 1970.
    set: u64,
}

impl TransportRecord {
    fn new(options: &TransportOptions) -> TransportRecord {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        TransportRecord {
            max_queue_depth: options.max_queue_depth,
            max_io_qpairs_per_ctrlr: options.max_io_queues,
            in_capsule_data_size: options.in_capsule_data_size,
            max_io_size: options.max_io_size,
            c2h_success: options.c2h_success != C2hSuccess::Off,
            set: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn apply(&self, mut options: TransportOptions) -> TransportOptions {
        options.max_queue_depth = self.max_queue_depth;
        options.max_io_queues = self.max_io_qpairs_per_ctrlr;
        options.in_capsule_data_size = self.in_capsule_data_size;
        options.max_io_size = self.max_io_size;
        options.c2h_success = if self.c2h_success { C2hSuccess::default() } else { C2hSuccess::Off };
        options
    }
}

/// Why the limits were not set.
pub(super) enum TransportError {
    /// The target refused them.
    Target(TargetError),
    /// They could not be recorded.
    Record(RpcError),
}

impl Daemon {
    /// Sets the limits, and records them in every pool, or leaves them as they were.
    pub(super) async fn set_transport(&self, options: TransportOptions) -> Result<(), TransportError> {
        let before = self.target.transport();
        let record = TransportRecord::new(&options);
        self.target.set_transport(options).map_err(TransportError::Target)?;
        for pool in self.pools.list() {
            if let Err(error) = write(&pool, &record).await {
                let _ = self.target.set_transport(before);
                return Err(TransportError::Record(error));
            }
        }
        self.transport.replace(Some(record));
        self.transport_created.set(true);
        Ok(())
    }

    /// Brings a pool's record and the limits in force in line.
    pub(super) async fn agree_on_transport(&self, pool: &Pool) {
        let stored = match pool.config_list(KEY).await {
            Ok(stored) => stored.into_iter().find(|(key, _)| key == KEY).map(|(_, value)| value),
            Err(error) => {
                return tracing::error!(pool = pool.name(), %error, "the transport's record cannot be read");
            }
        };
        let stored = stored.and_then(|value| serde_json::from_value::<TransportRecord>(value).ok());
        let ours = self.transport.borrow().clone();
        let differ = ours.is_some() && ours != stored;
        let newer = stored.filter(|stored| {
            !self.transport_created.get() && ours.as_ref().is_none_or(|ours| stored.set > ours.set)
        });
        if let Some(stored) = newer {
            match self.target.set_transport(stored.apply(self.target.transport())) {
                Ok(()) => drop(self.transport.replace(Some(stored))),
                Err(error) => {
                    tracing::error!(pool = pool.name(), %error, "the recorded transport is refused")
                }
            }
        } else if let Some(ours) = ours.filter(|_| differ)
            && let Err(error) = write(pool, &ours).await
        {
            tracing::error!(pool = pool.name(), ?error, "the transport cannot be recorded");
        }
    }
}

async fn write(pool: &Pool, record: &TransportRecord) -> Result<(), RpcError> {
    let value =
        serde_json::to_value(record).map_err(|error| RpcError::refused(libc::EIO, error.to_string()))?;
    pool.config_put(KEY, Some(value)).await.map_err(pool_error)
}
