//! Claims: exclusive use of a directory by one node at a time.
//!
//! A claim is an extended attribute, "BEAT HOLDER", that its holder renews by incrementing the
//! beat. It is changed only by compare-and-swap, and no clocks are compared: a node that wants
//! another's claim observes by its own clock that the beat has not changed for longer than the
//! holder trusts a renewal, and then takes exactly the claim that it has observed.

use fabric::rpc::Lease;
use threefs_meta::{At, MetaChange, MetaError, MetaQuery, MetaReply, SetMode};

use crate::Client;
use crate::error::ClientError;

/// Attribute that stores a claim.
const ATTRIBUTE: &str = "user.threefs.claim";
/// Maximum number of attempts: concurrent changes are rare.
const ATTEMPTS_MAX: u32 = 8;

/// Claim on a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Name of the holding node.
    pub holder: String,
    /// Number of renewals, which continues when the holder changes.
    pub beat: u64,
}

/// Result of a renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The renewed claim.
    Held(Claim),
    /// Lost: the current claim of another holder, or `None` without a claim.
    Lost(Option<Claim>),
}

impl Claim {
    fn encode(&self) -> Vec<u8> {
        format!("{} {}", self.beat, self.holder).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (beat, holder) = std::str::from_utf8(bytes).ok()?.split_once(' ')?;
        Some(Self { holder: holder.into(), beat: beat.parse().ok()? })
    }
}

impl Client {
    /// The claim on a directory.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn claim_of(&self, path: &str) -> Result<Option<Claim>, ClientError> {
        let query = MetaQuery::GetAttribute { at: At::path(path), name: ATTRIBUTE.into() };
        let what = format!("read the claim on `{path}`");
        match self.0.claims.query(&what, query, self.deadline()).await {
            Ok(MetaReply::Attribute(value)) => {
                Claim::decode(&value).map(Some).ok_or_else(|| ClientError::InvalidArgument {
                    detail: format!(
                        "attribute {ATTRIBUTE} of `{path}` is {:?}; the name is reserved by 3FS: remove it",
                        String::from_utf8_lossy(&value)
                    ),
                })
            }
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NoAttribute { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes or renews the claim on a directory for `holder`; another holder's claim is taken only
    /// if it equals `expired`. Returns the current claim; the caller checks its holder.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn claim(
        &self,
        path: &str,
        holder: &str,
        expired: Option<&Claim>,
    ) -> Result<Claim, ClientError> {
        let mut attempts = 0;
        loop {
            let existing = self.claim_of(path).await?;
            let (beat, mode) = match &existing {
                None => (0, SetMode::Create),
                Some(claim) if claim.holder == holder || Some(claim) == expired => {
                    (claim.beat, SetMode::Was(claim.encode()))
                }
                Some(claim) => return Ok(claim.clone()),
            };
            let claim = Claim { holder: holder.into(), beat: beat + 1 };
            match self.write_claim(path, Some(&claim), mode).await {
                Ok(()) => return Ok(claim),
                Err(ClientError::Meta(
                    MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                )) if attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
            attempts += 1;
        }
    }

    /// Renews a held claim, and never takes one: if it is gone, another node may have held and
    /// released it. A beat below the known one means the same.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn renew_claim(&self, path: &str, current: &Claim) -> Result<Renewal, ClientError> {
        let mut attempts = 0;
        loop {
            let existing = match self.claim_of(path).await? {
                Some(existing)
                    if existing.holder == current.holder && existing.beat >= current.beat =>
                {
                    existing
                }
                other => return Ok(Renewal::Lost(other)),
            };
            let claim = Claim { holder: existing.holder.clone(), beat: existing.beat + 1 };
            match self.write_claim(path, Some(&claim), SetMode::Was(existing.encode())).await {
                Ok(()) => return Ok(Renewal::Held(claim)),
                Err(ClientError::Meta(
                    MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                )) if attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
            attempts += 1;
        }
    }

    /// Releases a claim, if it is held by `holder`.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn unclaim(&self, path: &str, holder: &str) -> Result<(), ClientError> {
        match self.claim_of(path).await? {
            Some(claim) if claim.holder == holder => {
                match self.write_claim(path, None, SetMode::Was(claim.encode())).await {
                    // Held by another node by now.
                    Err(ClientError::Meta(
                        MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                    )) => Ok(()),
                    other => other,
                }
            }
            _ => Ok(()),
        }
    }

    async fn write_claim(
        &self,
        path: &str,
        claim: Option<&Claim>,
        mode: SetMode,
    ) -> Result<(), ClientError> {
        let value = claim.map(Claim::encode);
        let (at, name) = (At::path(path), ATTRIBUTE.into());
        let change = MetaChange::SetAttribute { at, name, value, mode };
        let what = format!("claim `{path}`");
        self.0.claims.change(&what, change, &Lease::default(), self.deadline()).await.map(drop)
    }
}
