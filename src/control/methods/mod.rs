//! The methods, one file per noun. Each file declares its methods and holds their handlers.
#![forbid(unsafe_code)]

mod bdev;
mod device;
mod system;

use super::table::Chapter;

/// The chapters of the table.
pub const CHAPTERS: &[Chapter] = &[system::CHAPTER, device::CHAPTER, bdev::CHAPTER];
