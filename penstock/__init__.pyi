from penstock_bulk.model import Model as Model
from penstock_bulk.model import load as load

__version__: str
IN_PROCESS: str
