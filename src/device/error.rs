//! What can go wrong with a device: while opening it ([`DeviceError`]) and while using it ([`IoError`]).

#![forbid(unsafe_code)]

use crate::units::SizeError;

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
    #[error("'{uri}': {size} bytes are not a whole number of blocks of {block_size} bytes")]
    UnevenSize { uri: String, size: u64, block_size: u32 },
    #[error("'{uri}': cannot map {size} bytes of memory: {source}")]
    Memory { uri: String, size: u64, source: std::io::Error },
}
