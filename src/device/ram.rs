//! `ram:SIZE`: memory as a device. Every operation is one copy, done at its first poll.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use uuid::Uuid;

use super::{DeviceError, DeviceInfo, DeviceKind, DeviceUri};
use crate::memory::SharedRegion;

pub(super) struct Ram {
    region: SharedRegion,
}

/// Opens `ram:SIZE?block_size=512|4096&populate=yes|no`. Populating takes the memory at once; otherwise a
/// first write to each 2 MiB may wait for the system to clear a huge page.
pub(super) fn open(uri: &DeviceUri) -> Result<(DeviceInfo, Ram), DeviceError> {
    uri.only("block_size, populate")?;
    let size = uri.size(&uri.address)?;
    let block_size = uri.block_size()?;
    uri.whole_blocks(size, block_size)?;
    let populate = uri.flag("populate")?;
    let region = usize::try_from(size)
        .map_err(|_| std::io::Error::from_raw_os_error(libc::ENOMEM))
        .and_then(SharedRegion::new)
        .and_then(|region| match populate {
            true => region.populate().map(|()| region),
            false => Ok(region),
        })
        .map_err(|source| DeviceError::Memory { uri: uri.text.clone(), size, source })?;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let info = DeviceInfo {
        uri: uri.text.clone(),
        name: format!("ram{}", NEXT.fetch_add(1, Ordering::Relaxed)),
        kind: DeviceKind::Ram,
        block_size,
        size,
        write_cache: false,
        atomic_bytes: block_size,
        uuid: Uuid::new_v4(),
    };
    Ok((info, Ram { region }))
}

/// A device that begins with a copy of `image`.
pub(super) fn from_image(image: &[u8], block_size: u32) -> Result<(DeviceInfo, Ram), DeviceError> {
    let uri = DeviceUri::parse(&format!("ram:{}?block_size={block_size}", image.len()))?;
    let (info, ram) = open(&uri)?;
    ram.write(0, image);
    Ok((info, ram))
}

impl Ram {
    pub(super) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.region.len()];
        self.region.copy_out(0, &mut image);
        image
    }

    // The ranges were checked against the device's size, which is the region's length and fits usize.

    pub(super) fn read(&self, offset: u64, dst: &mut [u8]) {
        self.region.copy_out(offset as usize, dst);
    }

    pub(super) fn write(&self, offset: u64, src: &[u8]) {
        self.region.copy_in(offset as usize, src);
    }

    pub(super) fn zero(&self, offset: u64, len: u64) {
        self.region.zero(offset as usize, len as usize);
    }
}
