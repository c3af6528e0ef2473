//! The methods, one file per noun. Each file declares its methods and holds their handlers.
#![forbid(unsafe_code)]

mod bdev;
pub mod device;
mod event;
mod export;
mod lvol;
pub mod nvmf;
mod paths;
mod pool;
mod snapshot;
mod system;
mod transfer;
mod volume;

use super::table::Chapter;

/// The chapters of the table.
pub const CHAPTERS: &[Chapter] = &[
    system::CHAPTER,
    event::CHAPTER,
    device::CHAPTER,
    pool::CHAPTER,
    volume::CHAPTER,
    snapshot::CHAPTER,
    transfer::CHAPTER,
    nvmf::CHAPTER,
    paths::CHAPTER,
    bdev::CHAPTER,
    lvol::CHAPTER,
];
