//! Memory that devices may read and write: aligned buffers and the arena they are cut from.
//!
//! Owns: every byte a device or a socket transfers. A [`DmaBuf`] is unique and mutable, a [`DmaSlice`]
//! shared and read-only; both are a part of one aligned block and keep that block alive, so an operation
//! in flight owns its bytes whatever happens to the future that started it.
//!
//! May assume: nothing about threads. Buffers may be dropped on any thread.
//!
//! Survives a crash: nothing.

mod arena;
mod buf;
mod mapping;
mod shared;

pub use arena::{ArenaConfig, ArenaStats, budget, budget_floor, configure, footprint, settle, stats};
pub use buf::{DmaBuf, DmaSlice, zeros};
pub use shared::SharedRegion;

/// Every buffer starts at a multiple of this many bytes (until it is split).
pub const BUFFER_ALIGN: usize = 4096;

#[cfg(test)]
mod tests;
