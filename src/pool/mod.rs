//! Pools: thin volumes in a tree of snapshots, on one or more devices.
//!
//! | file | what |
//! |---|---|
//! | `pointer` | the one pointer, the one page |
//! | `label`, `root`, `catalog`, `journal`, `space`, `node` | the stored forms and their rules, no I/O but the catalog's |
//! | `cache`, `tree` | a shard's pages and trees in memory |
//! | `shard`, `io`, `commit`, `walk`, `diff`, `reap`, `recover`, `copy` | a shard at work on its reactor |
//! | `picture`, `prove`, `fixed`, `entries` | what is checked: a shard's trees, what lies at fixed places, the catalog |
//! | `check`, `offline`, `sweep`, `scrub` | who checks: an open pool, one that is not, and an open one in the background |
//! | `finding`, `damage` | what a check says, and what was come upon in passing |
//! | `stage` | the journal's newest records in shared memory, for when only this process dies |
//! | `local`, `volume` | how requests find their shards |
//! | `records`, `home`, `keep`, `receive`, `info`, `event`, `background` | the pool as a whole: what the catalog says, the operations on it, what it does by itself |
//! | `manager`, `lifecycle` | all pools of the process; how one is created, opened and closed |
//!
//! What survives a crash: everything that was acknowledged as durable, and every operation wholly or not at all. When
//! only this process dies, everything that was acknowledged.
#![forbid(unsafe_code)]

mod background;
mod cache;
mod catalog;
mod check;
mod commit;
mod copy;
mod damage;
mod diff;
mod entries;
mod error;
mod event;
mod finding;
mod fixed;
mod handles;
mod home;
mod info;
mod io;
mod join;
mod journal;
mod keep;
mod label;
mod lifecycle;
mod local;
mod manager;
mod node;
mod offline;
mod picture;
mod pointer;
mod prove;
mod reap;
mod receive;
mod records;
mod recover;
mod regions;
mod resize;
mod root;
pub mod sabotage;
mod scrub;
mod shard;
mod space;
mod stage;
mod sweep;
mod tree;
mod volume;
mod walk;

#[cfg(test)]
mod tests;

pub use check::CheckOptions;
pub use damage::{DamageInfo, DamageState};
pub use diff::{DiffPart, DiffRange, RangeKind};
pub use error::{PoolError, PoolErrorKind};
pub use event::{EventSink, PoolEvent, PoolEventKind};
pub use finding::{CheckReport, Extent, Finding, Kind, Place, Severity};
pub use info::{NodeInfo, NodeKind, PoolInfo, RollbackInfo, VolumeSpec};
pub use label::{DEVICE_BYTES_MIN, Label, LabelError};
pub use manager::{Pool, PoolManager, PoolOptions};
pub use offline::check_devices;
pub use receive::{Identity, ReceiveSpec, receiving_name};
pub use records::Pin;
pub use scrub::{ScrubEnd, ScrubStatus};
pub use volume::Volume;

/// Forgets every pool that the reactors of this thread have open, as the end of a process would: nothing is written, and
/// nothing closed. For simulations, where many processes live and die on one thread.
pub fn forget_all() {
    lifecycle::forget_all();
    local::remove_all();
}
