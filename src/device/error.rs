//! What can go wrong with a device: while opening it ([`DeviceError`]) and while using it ([`IoError`]).

#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

use nix::errno::Errno;

use crate::units::{SizeError, format_size};

/// Why an I/O was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    #[error("offset or length is outside of the device or not a multiple of its block size")]
    OutOfRange,
    #[error("the device is read-only")]
    WriteProtected,
    #[error("no space is left")]
    CapacityExceeded,
    /// The medium failed, or what it returned does not match its checksum.
    #[error("unrecovered error at byte {offset}")]
    Unrecovered { offset: u64 },
    #[error("the device is busy")]
    Busy,
    #[error("the device is gone")]
    Gone,
    #[error("the device cannot do this")]
    Unsupported,
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    #[error("internal error: {0}")]
    Internal(&'static str),
}

/// Why a device was not opened.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(
        "'{uri}' is not a device URI: expected KIND:ADDRESS, such as ram:1GiB or uring:/var/lib/rimrock/pool.img?size=64GiB"
    )]
    NotAUri { uri: String },
    #[error("'{uri}': unknown kind of device '{kind}'; known are ram and uring")]
    UnknownKind { uri: String, kind: String },
    #[error("'{uri}': unknown option '{option}'; known are {known}")]
    UnknownOption { uri: String, option: String, known: &'static str },
    #[error("'{uri}': option '{option}' is given twice")]
    OptionTwice { uri: String, option: String },
    #[error("'{uri}': {source}")]
    Size { uri: String, source: SizeError },
    #[error("'{uri}': block_size is '{value}', expected 512 or 4096")]
    BlockSize { uri: String, value: String },
    #[error("'{uri}': {option} is '{value}', expected yes or no")]
    Flag { uri: String, option: &'static str, value: String },
    #[error("'{uri}': {size} bytes are not a whole number of blocks of {block_size} bytes")]
    UnevenSize { uri: String, size: u64, block_size: u32 },
    #[error("'{uri}': cannot map {size} bytes of memory: {source}")]
    Memory { uri: String, size: u64, source: io::Error },
    #[error("'{}' is not an absolute path: a device's path begins with '/', as in uring:/var/lib/rimrock/pool.img", .path.display())]
    NotAbsolute { path: PathBuf },
    #[error("{} is a directory; name a file in it, as in uring:{}/pool.img?size=64GiB", .path.display(), .path.display())]
    IsDirectory { path: PathBuf },
    #[error("{} is neither a regular file nor a block device", .path.display())]
    NotAFile { path: PathBuf },
    #[error("{} does not exist; add ?size=SIZE to create it", .path.display())]
    Missing { path: PathBuf },
    #[error("cannot create {}: the directory {} does not exist; create it first", .path.display(), .parent.display())]
    NoParent { path: PathBuf, parent: PathBuf },
    #[error("cannot open {}: {source}", .path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot open {}: its filesystem ({filesystem}) does not support O_DIRECT; use a file on ext4 or xfs, or a block device", .path.display())]
    NoDirect { path: PathBuf, filesystem: String },
    #[error("{} does not transfer blocks of {block_size} bytes; open it with block_size=4096", .path.display())]
    BlockTooSmall { path: PathBuf, block_size: u32 },
    #[error("{} has {actual} bytes, less than one block of {block_size}; give ?size=SIZE to set the size of an empty file", .path.display())]
    TooSmall { path: PathBuf, actual: u64, block_size: u32 },
    #[error("{} has {} ({actual} bytes), less than size={size}; open it without size=, or grow it first", .path.display(), format_size(*.actual))]
    Smaller { path: PathBuf, size: u64, actual: u64 },
    #[error("cannot set the size of {} to {}: {source}", .path.display(), format_size(*.size))]
    SetSize { path: PathBuf, size: u64, source: io::Error },
    #[error("{} is locked: another Rimrock or another process uses it{}", .path.display(), listed(" (open in ", .holders, ")"))]
    Locked { path: PathBuf, holders: String },
    #[error("cannot lock {}: {source}", .path.display())]
    Lock { path: PathBuf, source: Errno },
    #[error("{} is in use{}: it is mounted, part of LVM, md or another holder, or open in another Rimrock; release it first", .path.display(), listed(" (mounted at ", .mounts, ")"))]
    InUse { path: PathBuf, mounts: String },
}

/// `items` between two texts; nothing when there are none.
fn listed(before: &str, items: &str, after: &str) -> String {
    match items.is_empty() {
        true => String::new(),
        false => format!("{before}{items}{after}"),
    }
}
