//! Capabilities: access rights of a ticket's holder to one object at another service.
//!
//! The service that knows which objects a ticket covers signs a capability; the service that stores
//! the objects verifies it offline with the same key ring. A capability is bound to its ticket's
//! directory. It carries the issuer's terms: bytes, interpreted by the service that stores the
//! object, that restrict which parts of the object the holder may use.

use hmac::Mac;
use serde::{Deserialize, Serialize};

use super::keys::KeyRing;
use super::ticket::Ticket;
use crate::fault::{Fault, FaultCode};

/// Maximum lifetime of a capability; the lifetime of its ticket also bounds it.
pub const LIFE_S: u64 = 3600;

/// A capability for one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// Id of the key in the ring that signed it.
    key_id: u32,
    /// The object.
    object: u64,
    /// Whether it permits changes.
    write: bool,
    /// Expiry, in seconds since 1970.
    expires_unix_s: u64,
    /// Restrictions on the use of the object; see [`Capability::terms`].
    terms: Vec<u8>,
    mac: [u8; 32],
}

/// Access rights that a request carries. Requests of services carry none, and have the same
/// encoding in all releases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Presented {
    /// No capability: the cluster's key is sufficient.
    Nothing,
    /// Format of earlier releases, without terms. It grants no access.
    Unversioned {
        /// Id of the key in the ring that signed it.
        key_id: u32,
        /// The object.
        object: u64,
        /// Whether it permitted changes.
        write: bool,
        /// Expiry, in seconds since 1970.
        expires_unix_s: u64,
        /// MAC over all fields.
        mac: [u8; 32],
    },
    /// A capability.
    Capability(Capability),
}

impl Presented {
    /// The capability, if the request carries one.
    ///
    /// # Errors
    /// A fault that names the program to upgrade if the capability has the format of an earlier release.
    pub fn capability(&self) -> Result<Option<&Capability>, Fault> {
        match self {
            Self::Nothing => Ok(None),
            Self::Capability(capability) => Ok(Some(capability)),
            Self::Unversioned { .. } => Err(Fault::bad_request(
                "the client shows a capability without terms, this service takes version 3 of \
                 capabilities; upgrade the client and the metadata service to one release with it",
            )),
        }
    }
}

impl Capability {
    /// Issues a capability for the holder of this ticket.
    pub fn sign(
        ring: &KeyRing,
        ticket: &Ticket,
        object: u64,
        terms: Vec<u8>,
        now_unix_s: u64,
    ) -> Self {
        let (key_id, _) = ring.signing();
        let expires_unix_s = ticket.expires_unix_s.min(now_unix_s + LIFE_S);
        let write = !ticket.read_only;
        let mut signed = Self { key_id, object, write, expires_unix_s, terms, mac: [0; 32] };
        if let Some(mac) = signed.expected(ring, ticket.directory) {
            signed.mac.copy_from_slice(&mac.finalize().into_bytes());
        }
        signed
    }

    /// Verifies that it is authentic, not expired, and valid for this object and change.
    ///
    /// # Errors
    /// A fault that names the reason. It is retryable if a new capability would be accepted.
    pub fn check(
        &self,
        ring: &KeyRing,
        ticket: &Ticket,
        object: u64,
        write: bool,
        now_unix_s: u64,
    ) -> Result<(), Fault> {
        if self.object != object {
            let other = self.object;
            return Err(Fault::forbidden(format!("a capability for {other}, not for {object}")));
        }
        let Some(mac) = self.expected(ring, ticket.directory) else {
            let id = self.key_id;
            return Err(outdated(format!("unknown key {id} in the capability")));
        };
        if mac.verify_slice(&self.mac).is_err() {
            return Err(Fault::forbidden("the capability is invalid or belongs to another volume"));
        }
        if write && !self.write {
            return Err(Fault::forbidden("the capability is read-only"));
        }
        if self.expires_unix_s <= now_unix_s {
            return Err(outdated("the capability has expired".into()));
        }
        Ok(())
    }

    /// Expiry, in seconds since 1970.
    pub fn expires_unix_s(&self) -> u64 {
        self.expires_unix_s
    }

    /// The issuer's terms. Authentic only after [`Capability::check`] has succeeded.
    pub fn terms(&self) -> &[u8] {
        &self.terms
    }

    fn expected(&self, ring: &KeyRing, directory: u64) -> Option<impl Mac + use<>> {
        let key = ring.get(self.key_id)?.derive("capability 3", b"");
        Some(key.mac(&[
            &directory.to_le_bytes(),
            &self.object.to_le_bytes(),
            &[u8::from(self.write)],
            &self.expires_unix_s.to_le_bytes(),
            // The only field of variable length.
            &self.terms,
        ]))
    }
}

fn outdated(detail: String) -> Fault {
    Fault { code: FaultCode::Expired, detail }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::rpc::{decode, encode};

    const NOW: u64 = 1_800_000_000;

    fn ring(text: &str) -> KeyRing {
        KeyRing::parse(Path::new("ring"), text.as_bytes()).unwrap()
    }

    fn ticket(directory: u64, read_only: bool) -> Ticket {
        Ticket {
            cluster: "default".into(),
            key_id: 0,
            directory,
            path: "/volumes/pvc-1".into(),
            read_only,
            node: String::new(),
            expires_unix_s: NOW + 100,
        }
    }

    #[test]
    fn a_capability_is_for_one_object_one_volume_one_right_and_one_time() {
        let (cluster_ring, volume) = (ring("1:0123456789abcdef0123456789abcdef"), ticket(7, false));
        let signed = Capability::sign(&cluster_ring, &volume, 42, vec![1, 2, 3], NOW);
        assert!(signed.check(&cluster_ring, &volume, 42, true, NOW).is_ok());
        let code = |result: Result<(), Fault>| result.unwrap_err().code;
        let forbidden = FaultCode::Forbidden;
        assert_eq!(code(signed.check(&cluster_ring, &volume, 43, false, NOW)), forbidden);
        assert_eq!(code(signed.check(&cluster_ring, &ticket(8, false), 42, false, NOW)), forbidden);
        for forged in [
            Capability { object: 43, ..signed.clone() },
            Capability { expires_unix_s: NOW + 9999, ..signed.clone() },
            Capability { mac: [0; 32], ..signed.clone() },
            Capability { terms: vec![1, 2, 4], ..signed.clone() },
            Capability { terms: vec![1, 2], ..signed.clone() },
            Capability { terms: Vec::new(), ..signed.clone() },
        ] {
            assert_eq!(
                code(forged.check(&cluster_ring, &volume, forged.object, false, NOW)),
                forbidden
            );
        }
        let expired = signed.check(&cluster_ring, &volume, 42, false, NOW + 100);
        assert_eq!(code(expired), FaultCode::Expired);
        let rotated = ring("2:ffffffffffffffffffffffffffffffff");
        assert_eq!(code(signed.check(&rotated, &volume, 42, false, NOW)), FaultCode::Expired);
        let other = ring("1:ffffffffffffffffffffffffffffffff");
        assert_eq!(code(signed.check(&other, &volume, 42, false, NOW)), forbidden);
    }

    #[test]
    fn the_wire_format_is_stable_and_errors_name_former_capability_versions() {
        let nothing = encode(&("request", Presented::Nothing)).unwrap();
        assert_eq!(nothing, encode(&("request", None::<u8>)).unwrap());
        let former = encode(&Some((1u32, 42u64, true, NOW, [7u8; 32]))).unwrap();
        let presented: Presented = decode(&former).unwrap();
        let fault = presented.capability().unwrap_err();
        assert_eq!(fault.code, FaultCode::BadRequest);
        assert!(fault.detail.contains("upgrade the client"), "{fault}");
    }

    #[test]
    fn a_read_only_ticket_gets_capabilities_for_reading() {
        let (ring, volume) = (ring("1:0123456789abcdef0123456789abcdef"), ticket(7, true));
        let signed = Capability::sign(&ring, &volume, 42, Vec::new(), NOW);
        assert!(signed.check(&ring, &volume, 42, false, NOW).is_ok());
        assert!(signed.check(&ring, &volume, 42, true, NOW).is_err());
        let raised = Capability { write: true, ..signed };
        assert!(raised.check(&ring, &volume, 42, true, NOW).is_err());
    }
}
