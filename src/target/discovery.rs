//! The discovery log: which subsystems a host may use, and where it reaches them.
//!
//! A host sees the subsystems whose allow list has it, once for each address they listen on. A wildcard listener is shown
//! with the address by which this very host came here, for that one is known to work for it.
//!
//! Discovery is found at every listener, but its log only names the addresses that were given to it. Those entries say
//! that they lead to the same log, so that hosts which follow entries do not come back for ever, and that a host may stay.
//! Referrals name other places to ask.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use zerocopy::{FromZeros, IntoBytes};

use super::service::Shared;
use super::spec::Referral;
use crate::nvme::fabrics::CNTLID_DYNAMIC;
use crate::nvme::log::{DiscoveryLogEntry, DiscoveryLogHeader, EntryFlags, Treq, adrfam, subtype, trtype};
use crate::nvme::nqn::Nqn;

/// TREQ: no secure channel needed, and SQ flow control may be switched off.
const REQUIREMENTS: Treq = Treq(0).with_secure_channel(2).with_sq_flow_control_disable(true);

/// TREQ bits 1:0: only by a secure channel.
const SECURE_CHANNEL_REQUIRED: u8 = 1;
/// EFLAGS of the discovery subsystem's own entries: the log there is this one, and hosts may keep their connection
/// (Keep Alive and Asynchronous Event Request are served).
const SAME_LOG: EntryFlags = EntryFlags(0).with_duplicate_information(true).with_persistent_discovery(true);

/// The log as one host sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveryView {
    pub generation: u64,
    entries: Vec<u8>,
}

impl DiscoveryView {
    /// The log for `host`, whose connection came to `local`.
    pub fn build(shared: &Shared, host: &Nqn, local: SocketAddr) -> DiscoveryView {
        // Read first: a log that is newer than its generation only makes the host read once more.
        let generation = shared.discovery_generation();
        let queue_depth = shared.options().max_queue_depth;
        let mut entries = Vec::new();
        let mut subsystems = vec![Arc::clone(&shared.discovery)];
        subsystems.extend(shared.subsystems().into_iter().filter(|subsystem| subsystem.allows(host)));
        for (port, subsystem, addr) in subsystems
            .iter()
            .flat_map(|subsystem| subsystem.listeners().into_iter().map(move |addr| (subsystem, addr)))
            .filter_map(|(subsystem, addr)| Some((subsystem, reachable(addr, local)?)))
            .enumerate()
            .map(|(port, (subsystem, addr))| (port as u16, subsystem, addr))
        {
            let mut entry = entry(port, &subsystem.nqn, addr, queue_depth);
            if subsystem.is_discovery() {
                entry.subtype = subtype::CURRENT_DISCOVERY;
                entry.eflags = SAME_LOG.0.into();
            }
            entries.extend_from_slice(entry.as_bytes());
        }
        for referral in shared.referrals() {
            entries.extend_from_slice(refer(&referral, queue_depth).as_bytes());
        }
        DiscoveryView { generation, entries }
    }

    pub fn same_entries(&self, other: &DiscoveryView) -> bool {
        self.entries == other.entries
    }

    pub fn page(&self) -> Vec<u8> {
        let mut header = DiscoveryLogHeader::new_zeroed();
        header.genctr = self.generation.into();
        header.numrec = ((self.entries.len() / size_of::<DiscoveryLogEntry>()) as u64).into();
        let mut page = header.as_bytes().to_vec();
        page.extend_from_slice(&self.entries);
        page
    }
}

/// The address to show for a listener; `None` when a wildcard of the other family says nothing to this host.
fn reachable(listener: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
    if !listener.ip().is_unspecified() {
        return Some(listener);
    }
    let ip = local.ip().to_canonical();
    // A wildcard of IPv6 also takes IPv4.
    if listener.is_ipv4() && ip.is_ipv6() {
        return None;
    }
    Some(SocketAddr::new(ip, listener.port()))
}

fn refer(referral: &Referral, queue_depth: u16) -> DiscoveryLogEntry {
    let nqn = Nqn::new(&referral.nqn).unwrap_or_else(|_| Nqn::discovery());
    let mut entry = entry(0, &nqn, referral.addr, queue_depth);
    if nqn.is_discovery() {
        entry.subtype = subtype::REFERRAL;
    }
    if referral.secure_channel {
        entry.treq = Treq(entry.treq).with_secure_channel(SECURE_CHANNEL_REQUIRED).0;
    }
    entry
}

fn entry(port: u16, nqn: &Nqn, addr: SocketAddr, queue_depth: u16) -> DiscoveryLogEntry {
    let mut entry = DiscoveryLogEntry::new_zeroed();
    entry.trtype = trtype::TCP;
    entry.adrfam = match addr.ip() {
        IpAddr::V4(_) => adrfam::IPV4,
        IpAddr::V6(_) => adrfam::IPV6,
    };
    entry.subtype = subtype::NVM;
    entry.treq = REQUIREMENTS.0;
    entry.portid = port.into();
    entry.cntlid = CNTLID_DYNAMIC.into();
    entry.asqsz = queue_depth.into();
    DiscoveryLogEntry::set_text(&mut entry.trsvcid, &addr.port().to_string());
    entry.subnqn = nqn.to_field();
    DiscoveryLogEntry::set_text(&mut entry.traddr, &addr.ip().to_string());
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_is_shown_as_the_address_the_host_used() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let shown = |listener, local| reachable(addr(listener), addr(local));
        assert_eq!(shown("0.0.0.0:4420", "10.1.2.3:8009"), Some(addr("10.1.2.3:4420")));
        assert_eq!(shown("[::]:4420", "[::ffff:10.1.2.3]:8009"), Some(addr("10.1.2.3:4420")));
        assert_eq!(shown("[::]:4420", "[fe80::1]:8009"), Some(addr("[fe80::1]:4420")));
        assert_eq!(shown("0.0.0.0:4420", "[fe80::1]:8009"), None);
        assert_eq!(shown("192.0.2.7:4420", "10.1.2.3:8009"), Some(addr("192.0.2.7:4420")));
    }
}
