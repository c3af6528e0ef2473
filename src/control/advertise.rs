//! Telling the local network where discovery is, by multicast DNS (RFC 6762 and 6763): service type `_nvme-disc._tcp`, as
//! hosts with `nvme-stas` or `avahi` look for it.
//!
//! Off unless the configuration asks for it: it is heard by everyone on the network. What is announced follows what is
//! open, with a short delay; nothing is announced before the target listens, and a clean end takes all of it back.
#![forbid(unsafe_code)]

use super::Daemon;
use crate::nvme::nqn::DISCOVERY;
use mdns_sd::{ServiceDaemon, ServiceInfo};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

const SERVICE: &str = "_nvme-disc._tcp.local.";
/// How often what is announced is compared with what is open.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// The longest label of a name (RFC 1035, 2.3.4).
const LABEL_MAX: usize = 63;

/// The responder, and what it announces by address.
pub(super) struct Advertiser {
    responder: ServiceDaemon,
    announced: BTreeMap<SocketAddr, String>,
}

impl Advertiser {
    fn start() -> Result<Advertiser, mdns_sd::Error> {
        Ok(Advertiser { responder: ServiceDaemon::new()?, announced: BTreeMap::new() })
    }

    /// Announces what is open now, and takes back what no longer is.
    fn follow(&mut self, open: &[SocketAddr]) {
        let gone: Vec<SocketAddr> =
            self.announced.keys().filter(|addr| !open.contains(addr)).copied().collect();
        for name in gone.iter().filter_map(|addr| self.announced.remove(addr)) {
            if let Err(error) = self.responder.unregister(&name) {
                tracing::warn!(name, %error, "an announcement of discovery cannot be taken back");
            }
        }
        for addr in open {
            if self.announced.contains_key(addr) {
                continue;
            }
            let made = describe(*addr).and_then(|info| {
                let name = info.get_fullname().to_owned();
                self.responder.register(info).map(|()| name)
            });
            match made {
                Ok(name) => drop(self.announced.insert(*addr, name)),
                Err(error) => tracing::warn!(%addr, %error, "discovery cannot be announced"),
            }
        }
    }
}

impl Drop for Advertiser {
    fn drop(&mut self) {
        // Says goodbye to the network for all that is announced.
        drop(self.responder.shutdown());
    }
}

/// The announcement of one address; a wildcard stands for every address of this machine.
fn describe(addr: SocketAddr) -> Result<ServiceInfo, mdns_sd::Error> {
    let machine = machine();
    let mut instance = match addr.ip().is_unspecified() {
        true => format!("rimrock {machine} {}", addr.port()),
        false => format!("rimrock {machine} {addr}"),
    };
    instance.truncate(LABEL_MAX);
    let properties = [("p", "tcp"), ("nqn", DISCOVERY)];
    let host = format!("{machine}.local.");
    match addr.ip().is_unspecified() {
        true => ServiceInfo::new(SERVICE, &instance, &host, (), addr.port(), &properties[..])
            .map(ServiceInfo::enable_addr_auto),
        false => ServiceInfo::new(SERVICE, &instance, &host, addr.ip(), addr.port(), &properties[..]),
    }
}

/// This machine's name, as far as it can be one label of a host name.
fn machine() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
    let label: String = name.trim().chars().take_while(is_allowed).take(LABEL_MAX - 23).collect();
    if label.is_empty() { "rimrock".to_owned() } else { label }
}

impl Daemon {
    /// Keeps the network informed, for ever, if that is asked for.
    pub(super) async fn keep_advertising(&self) {
        if !self.advertises {
            return;
        }
        let mut advertiser = match Advertiser::start() {
            Ok(advertiser) => advertiser,
            Err(error) => return tracing::error!(%error, "discovery cannot be announced by multicast DNS"),
        };
        loop {
            advertiser.follow(&self.target.open_addresses());
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_says_where_and_how() {
        let info = describe("192.0.2.7:8009".parse().unwrap()).unwrap();
        assert_eq!((info.get_type(), info.get_port()), (SERVICE, 8009));
        assert_eq!(info.get_property_val_str("p"), Some("tcp"));
        assert_eq!(info.get_property_val_str("nqn"), Some(DISCOVERY));
        assert!(!info.is_addr_auto() && describe("0.0.0.0:4420".parse().unwrap()).unwrap().is_addr_auto());
        let long = describe("[2001:db8:1111:2222:3333:4444:5555:6666]:44200".parse().unwrap()).unwrap();
        assert!(long.get_fullname().len() <= LABEL_MAX + 1 + SERVICE.len());
    }
}
