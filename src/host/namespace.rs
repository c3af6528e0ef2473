//! A namespace as a host knows it.
#![forbid(unsafe_code)]

use uuid::Uuid;

use super::HostError;
use crate::nvme::identify::{IdentifyNamespace, Nsfeat, descriptors, nidt};

/// Size, format and identity of one namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    pub nsid: u32,
    /// Logical blocks (NSZE).
    pub blocks: u64,
    /// Bytes of one logical block.
    pub block_bytes: u32,
    /// Blocks in use (NUSE); only meaningful when thin.
    pub used_blocks: u64,
    pub is_thin: bool,
    pub is_read_only: bool,
    pub uuid: Option<Uuid>,
    /// All zeros when there is none.
    pub nguid: [u8; 16],
}

impl Namespace {
    /// From the pages of CNS 00h and 03h.
    pub fn new(
        nsid: u32,
        identify: &IdentifyNamespace,
        descriptor_page: &[u8],
    ) -> Result<Namespace, HostError> {
        let blocks = identify.nsze.get();
        if blocks == 0 {
            return Err(HostError::Invalid { what: "the namespace is not active" });
        }
        let Some(block_bytes) = identify.block_bytes() else {
            return Err(HostError::Nonsense {
                what: "the logical block size is below 512 bytes or above 2 GiB",
            });
        };
        if blocks.checked_mul(block_bytes.into()).is_none() {
            return Err(HostError::Nonsense { what: "the namespace has more than 2^64 bytes" });
        }
        if identify.format().ms.get() != 0 {
            return Err(HostError::Invalid { what: "namespaces formatted with metadata are not supported" });
        }
        let uuid = descriptors(descriptor_page)
            .find(|(kind, _)| *kind == nidt::UUID)
            .and_then(|(_, value)| Uuid::from_slice(value).ok());
        Ok(Namespace {
            nsid,
            blocks,
            block_bytes,
            used_blocks: identify.nuse.get(),
            is_thin: Nsfeat(identify.nsfeat).thinp(),
            is_read_only: identify.nsattr & 1 != 0,
            uuid,
            nguid: identify.nguid,
        })
    }

    /// Bytes; [`Namespace::new`] has checked that they can be counted.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::nvme::identify::{LbaFormat, descriptor_page};

    fn identify(blocks: u64, lbads: u8, ms: u16) -> IdentifyNamespace {
        let mut page = IdentifyNamespace::new_zeroed();
        page.nsze = blocks.into();
        page.lbaf[0] = LbaFormat { ms: ms.into(), lbads, rp: 0 };
        page
    }

    #[test]
    fn pages_are_judged_before_they_are_used() {
        let uuid = Uuid::from_u128(7);
        let descriptors = descriptor_page([(nidt::CSI, &[0][..]), (nidt::UUID, uuid.as_bytes())]);
        let ns = Namespace::new(3, &identify(100, 12, 0), &descriptors[..]).unwrap();
        assert_eq!((ns.nsid, ns.bytes(), ns.uuid), (3, 409_600, Some(uuid)));
        assert!(matches!(Namespace::new(1, &identify(0, 12, 0), &[]), Err(HostError::Invalid { .. })));
        assert!(matches!(Namespace::new(1, &identify(1, 12, 8), &[]), Err(HostError::Invalid { .. })));
        for (blocks, lbads) in [(1, 8), (1, 32), (1, 255), (u64::MAX, 9)] {
            let outcome = Namespace::new(1, &identify(blocks, lbads, 0), &[]);
            assert!(matches!(outcome, Err(HostError::Nonsense { .. })), "{blocks} blocks of 2^{lbads}");
        }
        let short = descriptor_page([(nidt::UUID, &[1, 2, 3][..])]);
        assert_eq!(Namespace::new(1, &identify(1, 9, 0), &short[..]).unwrap().uuid, None);
    }
}
