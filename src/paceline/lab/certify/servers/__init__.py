"""Certifies servers by their answers alone: any that speaks OpenAI's protocol."""

from paceline.lab.certify.servers.answers import AnsweringServer as AnsweringServer
from paceline.lab.certify.servers.run import ServerCertificate as ServerCertificate
from paceline.lab.certify.servers.run import ServerCertifier as ServerCertifier
from paceline.lab.certify.servers.run import ServerEffort as ServerEffort
