//! Device URIs: `KIND:ADDRESS?option=value&option=value`.

#![forbid(unsafe_code)]

use super::DeviceError;
use crate::units::parse_size;

/// A device URI, taken apart. What address and options mean is the kind's business.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUri {
    pub text: String,
    pub scheme: String,
    pub address: String,
    pub options: Vec<(String, String)>,
}

impl DeviceUri {
    pub fn parse(text: &str) -> Result<DeviceUri, DeviceError> {
        let not_a_uri = || DeviceError::NotAUri { uri: text.to_owned() };
        let (scheme, rest) = text.split_once(':').ok_or_else(not_a_uri)?;
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        if scheme.is_empty() || address.is_empty() {
            return Err(not_a_uri());
        }
        let mut options: Vec<(String, String)> = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (key, value) = option.split_once('=').ok_or_else(not_a_uri)?;
            if options.iter().any(|(known, _)| known == key) {
                return Err(DeviceError::OptionTwice { uri: text.to_owned(), option: key.to_owned() });
            }
            options.push((key.to_owned(), value.to_owned()));
        }
        let (text, scheme, address) = (text.to_owned(), scheme.to_owned(), address.to_owned());
        Ok(DeviceUri { text, scheme, address, options })
    }

    pub(super) fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Refuses options other than those in `known`, a list separated by commas and spaces.
    pub(super) fn only(&self, known: &'static str) -> Result<(), DeviceError> {
        match self.options.iter().find(|(key, _)| !known.split(", ").any(|name| name == key)) {
            None => Ok(()),
            Some((option, _)) => {
                Err(DeviceError::UnknownOption { uri: self.text.clone(), option: option.clone(), known })
            }
        }
    }

    pub(super) fn size(&self, text: &str) -> Result<u64, DeviceError> {
        parse_size(text).map_err(|source| DeviceError::Size { uri: self.text.clone(), source })
    }

    /// The `block_size` option; 4096 when it is not given.
    pub(super) fn block_size(&self) -> Result<u32, DeviceError> {
        match self.option("block_size") {
            None | Some("4096") => Ok(4096),
            Some("512") => Ok(512),
            Some(other) => Err(DeviceError::BlockSize { uri: self.text.clone(), value: other.to_owned() }),
        }
    }

    /// Whether an option that is `yes` or `no` is `yes`; `no` when it is not given.
    pub(super) fn flag(&self, key: &'static str) -> Result<bool, DeviceError> {
        match self.option(key) {
            None | Some("no") => Ok(false),
            Some("yes") => Ok(true),
            Some(value) => {
                Err(DeviceError::Flag { uri: self.text.clone(), option: key, value: value.to_owned() })
            }
        }
    }

    pub(super) fn whole_blocks(&self, size: u64, block_size: u32) -> Result<(), DeviceError> {
        match size.is_multiple_of(block_size.into()) {
            true => Ok(()),
            false => Err(DeviceError::UnevenSize { uri: self.text.clone(), size, block_size }),
        }
    }
}
