//! Why an operation on a pool was refused or failed.
#![forbid(unsafe_code)]

use super::catalog::CatalogError;
use super::records::RecordError;
use super::recover::RecoverError;
use crate::device::IoError;

/// The kind, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolErrorKind {
    /// There is no such pool, volume or snapshot.
    NotFound,
    /// The name is taken.
    Exists,
    /// A parameter is not acceptable.
    Invalid,
    /// Something still uses it.
    Busy,
    /// There is not enough space.
    NoSpace,
    /// The devices or what is on them failed.
    Failed,
}

/// The kind and a text for people: what, where, and what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct PoolError {
    /// For programs.
    pub kind: PoolErrorKind,
    /// For people.
    pub text: String,
}

impl PoolError {
    pub(super) fn new(kind: PoolErrorKind, text: impl Into<String>) -> PoolError {
        PoolError { kind, text: text.into() }
    }

    pub(super) fn not_found(text: impl Into<String>) -> PoolError {
        PoolError::new(PoolErrorKind::NotFound, text)
    }

    pub(super) fn exists(text: impl Into<String>) -> PoolError {
        PoolError::new(PoolErrorKind::Exists, text)
    }

    pub(super) fn invalid(text: impl Into<String>) -> PoolError {
        PoolError::new(PoolErrorKind::Invalid, text)
    }

    pub(super) fn busy(text: impl Into<String>) -> PoolError {
        PoolError::new(PoolErrorKind::Busy, text)
    }
}

impl From<IoError> for PoolError {
    fn from(error: IoError) -> PoolError {
        match error {
            IoError::CapacityExceeded => PoolError::new(PoolErrorKind::NoSpace, "the pool has no space left"),
            error => PoolError::new(PoolErrorKind::Failed, format!("the pool's devices failed: {error}")),
        }
    }
}

impl From<CatalogError> for PoolError {
    fn from(error: CatalogError) -> PoolError {
        let kind = match error {
            CatalogError::Full { .. } => PoolErrorKind::NoSpace,
            _ => PoolErrorKind::Failed,
        };
        PoolError::new(kind, error.to_string())
    }
}

impl From<RecoverError> for PoolError {
    fn from(error: RecoverError) -> PoolError {
        PoolError::new(PoolErrorKind::Failed, error.to_string())
    }
}

impl From<RecordError> for PoolError {
    fn from(error: RecordError) -> PoolError {
        PoolError::new(PoolErrorKind::Failed, error.to_string())
    }
}
